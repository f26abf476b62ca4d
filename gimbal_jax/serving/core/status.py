"""What the server shows of itself: frozen snapshots for clients, metrics and tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from gimbal_jax.scheduler.trace import Trace
from gimbal_jax.serving.engine.histogram import HistogramRecord

Outcome = Literal["applied", "migrating", "kept", "failed"]
State = Literal["warming", "serving", "draining", "stopped", "failed"]


@dataclass(frozen=True)
class PlacementRecord:
    """One placement decision, with what it was based on and what became of it."""

    time: float
    step: int
    policy: str
    outcome: Outcome
    reason: str
    cost_before: float
    cost_after: float
    imbalance_before: float
    """Max over mean rank load of the window, mean over layers."""
    imbalance_after: float
    remote_share_before: float
    """Share of the window's expert tokens that leave their source's ranks."""
    remote_share_after: float
    far_share_before: float
    """Share that leaves its source's machine; 0 on one."""
    far_share_after: float
    experts_moved: int
    seconds: float
    """Time the decision took."""


@dataclass(frozen=True)
class PlacementTotals:
    """The placement loop since start. Gains are shares of the objective that a placement saves, its moves included."""

    kept: int = 0
    """Decisions that moved nothing."""
    applied: int = 0
    """Decisions whose moves are complete."""
    failed_decisions: int = 0
    failed_migrations: int = 0
    decision_seconds: float = 0.0
    """Time that decisions took, beside the engine thread."""
    migration_seconds: float = 0.0
    """Time that the engine thread spent on moves."""
    predicted_gain: float | None = None
    """Of the last placement applied, on the traffic that it was decided by; None before the first."""
    achieved_gain: float | None = None
    """The same on the first window that closed since, traffic that the decision had not seen; None until it has.

    Below 0 the moves cost more than they saved. Counts are by logical expert, so that
    both placements can be priced on one window, whichever was in force."""


@dataclass(frozen=True)
class QueueHead:
    """The waiting request that an engine would run first."""

    request_id: str
    waited_s: float
    """Since its arrival, preemptions included."""
    prefill_tokens: int
    """Tokens that it has to compute before its next one."""


@dataclass(frozen=True)
class PhaseTimes:
    """How long one part of a tick took, over the last ticks that had a step."""

    name: str
    """schedule, batch, enqueue, wait, commit, emit, or other (traces, placement, inboxes)."""
    mean_s: float
    p50_s: float
    p99_s: float


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
