"""One placement decision: from the traffic and the placement in force to rounds of moves.

A process of its own makes it (see ``placement_process``), so this module imports no jax and no gRPC.
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
"""A placement policy: (counts_LSE, slot_of_expert_LE in force, mesh, settings) to a proposal, as ``propose``."""


@dataclass(frozen=True)
class PlacementStats:
    """How a placement spreads the traffic of a window."""

    imbalance: float
    """Max over mean rank load, mean over layers."""
    remote_share: float
    """Share of the expert tokens that leave their source's ranks."""
    far_share: float
    """Share of them that leave its node."""


@dataclass(frozen=True)
class Decision:
    """What is handed back to the engine thread."""

    proposal: Proposal
    rounds: list[tuple[int, Round]]
    """(MoE layer, round) in the order to run them."""
    seconds: float
    achieved_gain: float | None
    """Of the placement in force, where it was still to be judged."""
    before: PlacementStats
    after: PlacementStats
    """Of the window, under the placement in force and under the one to come."""


def placement_stats(counts_LSE: np.ndarray, slot_of_expert_LE: np.ndarray, mesh: MeshConfig) -> PlacementStats:
    """Takes milliseconds with many sources."""
    placed = counts_LSE, slot_of_expert_LE
    imbalance = float(imbalance_L(*placed, mesh.ranks).mean())
    return PlacementStats(imbalance, remote_share(*placed, mesh.ranks), far_share(*placed, mesh))


def decide(
    policy: Propose,
    counts_LSE: np.ndarray,
    slot_of_expert_LE: np.ndarray,
    config: ServerConfig,
    window_LSE: np.ndarray,
    left_slot_LE: np.ndarray | None,
) -> Decision:
    """``left_slot_LE`` was left for the placement in force, which ``window_LSE`` is the first to judge."""
    began = time.perf_counter()
    proposal = policy(counts_LSE, slot_of_expert_LE, config.mesh, config.placement)
    rounds = rounds_between(slot_of_expert_LE, proposal.slot_of_expert_LE, config) if proposal.apply else []
    seconds = time.perf_counter() - began
    gain = None if left_slot_LE is None else gain_of(window_LSE, slot_of_expert_LE, left_slot_LE, config)
    before = after = placement_stats(window_LSE, slot_of_expert_LE, config.mesh)
    if proposal.apply:
        after = placement_stats(window_LSE, proposal.slot_of_expert_LE, config.mesh)
    return Decision(proposal, rounds, seconds, gain, before, after)


def rounds_between(old_slot_LE: np.ndarray, new_slot_LE: np.ndarray, config: ServerConfig) -> list[tuple[int, Round]]:
    """(MoE layer, round) from one placement to another, layer by layer."""
    return [
        (layer, moves)
        for layer, (old_slot_E, new_slot_E) in enumerate(zip(old_slot_LE, new_slot_LE, strict=True))
        for moves in plan_rounds(old_slot_E, new_slot_E, config.mesh.ranks, config.placement.rows_per_pair)
    ]


def gain_of(
    counts_LSE: np.ndarray, new_slot_LE: np.ndarray, old_slot_LE: np.ndarray, config: ServerConfig
) -> float | None:
    """Share of the objective that going from the old placement to the new one saves on this traffic, moves included.

    None where staying costs nothing, as without traffic.
    """
    weights = config.placement
    apart_SR = distance_SR(config.mesh, weights.far_distance)
    before = float(placement_cost_L(counts_LSE, old_slot_LE, old_slot_LE, apart_SR, weights).mean())
    after = float(placement_cost_L(counts_LSE, new_slot_LE, old_slot_LE, apart_SR, weights).mean())
    return relative_gain(before, after)


def relative_gain(before: float, after: float) -> float | None:
    """None where there was nothing to save."""
    return 1 - after / before if before > 0 else None
