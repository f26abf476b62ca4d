"""Records of the placement loop, for clients, metrics and files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Outcome = Literal["applied", "migrating", "kept", "failed"]


@dataclass(frozen=True, eq=False)
class ClosedWindow:
    """The expert traffic of one window."""

    counts_LSE: np.ndarray
    """Expert tokens by MoE layer, source engine and expert."""
    slot_of_expert_LE: np.ndarray
    """Placement at the end of the window."""
    steps: int
    """Steps in the window."""
    step: int
    """Steps since start at the end of the window."""
    time: float
    """Seconds on the server's clock at the end of the window."""


@dataclass(frozen=True)
class PlacementRecord:
    """One placement decision: the traffic that it was based on, and its outcome."""

    time: float
    """Seconds on the server's clock when the decision was taken."""
    step: int
    """Steps since start when the decision was taken."""
    policy: str
    outcome: Outcome
    reason: str
    cost_before: float
    """Objective of the old placement, mean over layers; 0 if the decision failed."""
    cost_after: float
    """Objective of the proposed placement, moves included, mean over layers; 0 if the decision failed."""
    imbalance_before: float
    """Max over mean rank load of the window, mean over layers."""
    imbalance_after: float
    """Imbalance of the window under the new placement."""
    remote_share_before: float
    """Share of the window's expert tokens that leave their source's ranks."""
    remote_share_after: float
    """Remote share of the window under the new placement."""
    far_share_before: float
    """Share of the window's expert tokens that leave their source's node; 0 on one node."""
    far_share_after: float
    """Far share of the window under the new placement."""
    experts_moved: int
    """Experts that change their rank, over all layers; 0 if the placement is kept."""
    seconds: float
    """Time that the decision took."""


@dataclass
class PlacementTotals:
    """Counters of the placement loop since start.

    Gains are shares of the objective that a placement saves, its moves included.
    """

    kept: int = 0
    """Decisions that moved nothing."""
    applied: int = 0
    """Decisions whose moves are complete."""
    failed_decisions: int = 0
    failed_migrations: int = 0
    decision_seconds: float = 0.0
    """Time that decisions took, in parallel with the engine thread."""
    migration_seconds: float = 0.0
    """Time that the engine thread spent on moves."""
    experts_moved: int = 0
    """Experts that changed their rank in applied placements."""
    bytes_moved: int = 0
    """Bytes of expert weights sent between ranks, failed migrations included."""
    predicted_gain: float | None = None
    """Gain of the last applied placement on the traffic of its decision; None before the first."""
    achieved_gain: float | None = None
    """Gain of the last applied placement on the first window after it; None until that window has closed.

    The decision has not seen this window. A value below 0 means that the moves cost more than they saved. Counts are
    by logical expert, so both placements can be priced on one window.
    """
    last_rebalance: float | None = None
    """Seconds on the server's clock when the last applied placement was complete; None before the first."""


@dataclass(frozen=True, eq=False)
class PlacementStatus:
    """The placement loop at one moment. Arrays are copies; axes: L MoE layers, S source engines, E experts."""

    slot_of_expert_LE: np.ndarray
    """Current placement."""
    window_counts_LSE: np.ndarray
    """Expert tokens of the last closed window; 0 before the first."""
    total_counts_LSE: np.ndarray
    """Expert tokens since start, the open window included."""
    records: tuple[PlacementRecord, ...]
    """The last decisions, oldest first."""
    totals: PlacementTotals
    windows_written: int
    """Closed windows written to files; 0 without --dump-counts."""
    windows_lost: int
    """Closed windows that could not be written to files."""
