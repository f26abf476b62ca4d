"""One placement decision: from a window's traffic and the current placement to rounds of moves.

A child process makes it (see ``process``), so this module imports neither jax nor gRPC.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gimbal_jax.config import MeshConfig, PlacementConfig, ServerConfig
from gimbal_jax.scheduler.distance import distance_SR
from gimbal_jax.scheduler.migration import Round, plan_rounds
from gimbal_jax.scheduler.objective import placement_cost_L
from gimbal_jax.scheduler.placement import Proposal
from gimbal_jax.scheduler.traffic import far_share, imbalance_L, remote_share

Propose = Callable[[np.ndarray, np.ndarray, MeshConfig, PlacementConfig], Proposal]
"""A placement policy: (counts_LSE, current slot_of_expert_LE, mesh, settings) to a proposal, as ``propose``."""


@dataclass(frozen=True)
class PlacementStats:
    """How a placement spreads the traffic of a window."""

    imbalance: float
    """Max over mean rank load, mean over layers."""
    remote_share: float
    """Share of the expert tokens that leave their source's ranks."""
    far_share: float
    """Share of the expert tokens that leave their source's node."""


@dataclass(frozen=True)
class Decision:
    """The result of one decision, as the engine thread receives it."""

    proposal: Proposal
    rounds: list[tuple[int, Round]]
    """(MoE layer, round) in the order to run them; empty if the placement is kept."""
    seconds: float
    """Time that the policy and the planning of rounds took."""
    achieved_gain: float | None
    """Gain of the current placement on the window; None if an earlier window has measured it already."""
    before: PlacementStats
    """The window under the current placement."""
    after: PlacementStats
    """The window under the new placement; equal to ``before`` if the placement is kept."""


def decide(
    policy: Propose,
    counts_LSE: np.ndarray,
    slot_of_expert_LE: np.ndarray,
    config: ServerConfig,
    window_LSE: np.ndarray,
    previous_LE: np.ndarray | None,
) -> Decision:
    """Choose a placement and plan its moves.

    ``counts_LSE``: traffic to decide by, which smoothing may have made fractions.
    ``window_LSE``: traffic of the last window alone.
    ``previous_LE``: the placement before the current one, if ``window_LSE`` is the first window measured under the
    current one. The achieved gain is computed from it.
    """
    began = time.perf_counter()
    proposal = policy(counts_LSE, slot_of_expert_LE, config.mesh, config.placement)
    rounds = rounds_between(slot_of_expert_LE, proposal.slot_of_expert_LE, config) if proposal.apply else []
    seconds = time.perf_counter() - began
    gain = None if previous_LE is None else gain_of(window_LSE, slot_of_expert_LE, previous_LE, config)
    before = after = placement_stats(window_LSE, slot_of_expert_LE, config.mesh)
    if proposal.apply:
        after = placement_stats(window_LSE, proposal.slot_of_expert_LE, config.mesh)
    return Decision(proposal, rounds, seconds, gain, before, after)


def failed_decision(
    error: BaseException, window_LSE: np.ndarray, slot_of_expert_LE: np.ndarray, mesh: MeshConfig
) -> Decision:
    """Return the decision to keep the placement because ``decide`` raised ``error``."""
    stats = placement_stats(window_LSE, slot_of_expert_LE, mesh)
    proposal = Proposal(slot_of_expert_LE, 0.0, 0.0, 0, False, f"decision failed: {error}")
    return Decision(proposal, rounds=[], seconds=0.0, achieved_gain=None, before=stats, after=stats)


def placement_stats(counts_LSE: np.ndarray, slot_of_expert_LE: np.ndarray, mesh: MeshConfig) -> PlacementStats:
    """Measure a placement on a window. Takes milliseconds with many sources."""
    imbalance = float(imbalance_L(counts_LSE, slot_of_expert_LE, mesh.ranks).mean())
    remote = remote_share(counts_LSE, slot_of_expert_LE, mesh.ranks)
    return PlacementStats(imbalance, remote, far_share(counts_LSE, slot_of_expert_LE, mesh))


def rounds_between(old_slot_LE: np.ndarray, new_slot_LE: np.ndarray, config: ServerConfig) -> list[tuple[int, Round]]:
    """Plan the moves from one placement to another as (MoE layer, round), layer by layer."""
    return [
        (layer, moves)
        for layer, (old_slot_E, new_slot_E) in enumerate(zip(old_slot_LE, new_slot_LE, strict=True))
        for moves in plan_rounds(old_slot_E, new_slot_E, config.mesh.ranks, config.placement.rows_per_pair)
    ]


def gain_of(
    counts_LSE: np.ndarray, new_slot_LE: np.ndarray, old_slot_LE: np.ndarray, config: ServerConfig
) -> float | None:
    """Return the share of the objective that the new placement saves on this traffic, moves included.

    None if the old placement costs nothing, for example without traffic.
    """
    weights = config.placement
    apart_SR = distance_SR(config.mesh, weights.far_distance)
    before = float(placement_cost_L(counts_LSE, old_slot_LE, old_slot_LE, apart_SR, weights).mean())
    after = float(placement_cost_L(counts_LSE, new_slot_LE, old_slot_LE, apart_SR, weights).mean())
    return relative_gain(before, after)


def relative_gain(before: float, after: float) -> float | None:
    """Return the saved share of a cost; None if there was no cost to save."""
    return 1 - after / before if before > 0 else None
