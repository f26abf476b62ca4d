"""Records of placement decisions, for clients, metrics and logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["applied", "migrating", "kept", "failed"]


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
