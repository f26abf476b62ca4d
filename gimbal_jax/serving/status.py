"""What the server shows of itself: frozen snapshots for clients, metrics and tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from gimbal_jax.scheduler.trace import Trace

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
    experts_moved: int
    seconds: float
    """Time the decision took."""


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
    """Tokens that went through the model, per source; total_counts = tokens * k per layer."""
    free_pages_S: tuple[int, ...]
    preemptions: int
    placements: tuple[PlacementRecord, ...]
    """The last decisions, oldest first."""
    experts_moved: int
    bytes_moved: int
    last_rebalance: float | None
    """Time when the last applied placement was complete."""
    windows_written: int
    windows_lost: int
    """Closed windows that went to files, and those that could not; 0 where no windows are dumped."""
    compiles_after_warmup: int
