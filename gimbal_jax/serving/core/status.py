"""What the server shows of itself: frozen snapshots for clients, metrics and tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from gimbal_jax.scheduler.trace import Trace
from gimbal_jax.serving.engine.meters import HistogramRecord, PhaseTimes
from gimbal_jax.serving.engine.queue import QueueHead
from gimbal_jax.serving.placement.records import PlacementRecord, PlacementTotals

State = Literal["warming", "serving", "draining", "stopped", "failed"]


@dataclass(frozen=True)
class Status:
    """The server at one moment. Arrays are copies; axes: L MoE layers, S sources, E experts."""

    state: State
    error: str
    step: int
    traces: tuple[Trace, ...]
    slot_of_expert_LE: np.ndarray
    window_counts_LSE: np.ndarray
    """Traffic of the last closed window."""
    total_counts_LSE: np.ndarray
    """Traffic since start, open window included."""
    tokens_computed_S: tuple[int, ...]
    """Tokens that went through the model, per source; total_counts = tokens * k per layer, but while steps run the
    counts follow up to a trace period later."""
    prefill_tokens_S: tuple[int, ...]
    """Those of them that were prefill."""
    free_pages_S: tuple[int, ...]
    queue_head_S: tuple[QueueHead | None, ...]
    """None where nothing waits."""
    preemptions_S: tuple[int, ...]
    placements: tuple[PlacementRecord, ...]
    """The last decisions, oldest first."""
    placement_totals: PlacementTotals
    experts_moved: int
    bytes_moved: int
    last_rebalance: float | None
    """Time when the last applied placement was complete."""
    windows_written: int
    windows_lost: int
    """Closed windows that went to files, and those that could not; 0 where no windows are dumped."""
    compiles_after_warmup: int
    step_seconds: HistogramRecord
    """Steps by the time that the runner took for them."""
    step_tokens: HistogramRecord
    """Steps by the tokens of all engines in them."""
    prefix_queries_S: tuple[int, ...]
    """Prompt tokens that were looked up in the prefix cache when their sequence got a row."""
    prefix_hits_S: tuple[int, ...]
    """Those of them that it held."""
    cached_pages_S: tuple[int, ...]
    """Pages that hold a known beginning, in use or not."""
    phases: tuple[PhaseTimes, ...]
    """The profile of the host's work per step."""

    @property
    def preemptions(self) -> int:
        """Of all engines."""
        return sum(self.preemptions_S)
