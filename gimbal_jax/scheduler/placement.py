"""Which rank holds each expert (paper 5): from a window's traffic to a proposed placement.

A placement is ``slot_of_expert_LE`` (int32): a permutation of E slots per MoE layer, ``E // R`` slots on each rank.
Axes: L MoE layers, S sources (DP engines), E experts, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import numpy as np

from gimbal_jax.config import MeshConfig, PlacementConfig, PlacementPolicy
from gimbal_jax.scheduler.distance import distance_SR
from gimbal_jax.scheduler.eplb import hierarchical_rank_LE, packed_rank_LE
from gimbal_jax.scheduler.greedy import greedy_rank_LE
from gimbal_jax.scheduler.migration import migration_between
from gimbal_jax.scheduler.objective import window_objective
from gimbal_jax.scheduler.refined import refined_rank_LE
from gimbal_jax.scheduler.relabel import fewest_moves_rank_LE
from gimbal_jax.scheduler.traffic import rank_of_expert

_BY_LOAD_ALONE: tuple[PlacementPolicy, ...] = ("eplb", "eplb_hierarchical")
"""Policies without an objective: every placement that they find is applied, at any cost."""


@dataclass(frozen=True, eq=False)
class Proposal:
    """The answer of a placement policy."""

    slot_of_expert_LE: np.ndarray
    """The proposed placement, also if ``apply`` is False."""
    cost_before: float
    """Objective of the current placement, mean over layers."""
    cost_after: float
    """Objective of the proposed placement including its moves, mean over layers."""
    experts_moved: int
    """Number of experts that change rank, over all layers."""
    apply: bool
    """Whether the proposed placement is worth its moves."""
    reason: str
    """Why ``apply`` is True or False, in words."""


def static_placement(layers: int, experts: int, ranks: int) -> np.ndarray:
    """Return the contiguous placement: expert e in slot e of every layer.

    Raises ValueError if the experts do not divide over the ranks.
    """
    _check_split(experts, ranks)
    return np.tile(np.arange(experts, dtype=np.int32), (layers, 1))


def _check_split(experts: int, ranks: int) -> None:
    if experts % ranks:
        possible = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
        raise ValueError(f"{experts} experts cannot be split over {ranks} ranks (dp * tp); possible: {possible}")


def propose(
    counts_LSE: np.ndarray, slot_of_expert_LE: np.ndarray, mesh: MeshConfig, config: PlacementConfig
) -> Proposal:
    """Propose a placement by ``config.policy`` from one window's traffic and the current placement.

    The gimbal policies change only layers whose cost falls. They apply a placement only if it lowers the mean
    objective by more than ``min_gain``. The EPLB policies apply every placement that differs, ``static`` none.
    A layer without traffic keeps its placement.
    Raises ValueError if the experts do not divide over the ranks of ``mesh``, if the ranks do not divide over the
    nodes, or if the counts have another number of sources.
    """
    ranks = mesh.ranks
    _check_split(slot_of_expert_LE.shape[1], ranks)
    if counts_LSE.shape[1] != mesh.dp:
        raise ValueError(f"the counts are of {counts_LSE.shape[1]} sources, the mesh has {mesh.dp}")
    apart_SR = distance_SR(mesh, config.far_distance)
    objective = window_objective(counts_LSE, slot_of_expert_LE, apart_SR, config)
    old_rank_LE = objective.old_rank_LE
    policy = config.policy
    match policy:
        case "static":
            rank_LE = old_rank_LE
        case "eplb":
            rank_LE = packed_rank_LE(counts_LSE.sum(axis=1), ranks)
        case "eplb_hierarchical":
            rank_LE = hierarchical_rank_LE(counts_LSE.sum(axis=1), ranks, mesh.nodes)
        case "gimbal":
            rank_LE = greedy_rank_LE(objective)
        case "gimbal_refined":
            rank_LE = refined_rank_LE(objective)
        case _:
            assert_never(policy)
    rank_LE = fewest_moves_rank_LE(rank_LE, old_rank_LE, apart_SR)

    # Keep the layers that have no traffic or would not gain.
    before_L = objective.cost_L(old_rank_LE)
    change_L = counts_LSE.any(axis=(1, 2))
    if policy not in _BY_LOAD_ALONE:
        change_L &= objective.cost_L(rank_LE) < before_L
    rank_LE = np.where(change_L[:, None], rank_LE, old_rank_LE)
    new_slot_LE = assign_slots(rank_LE, slot_of_expert_LE, ranks)

    # Judge the whole proposal.
    before, after = float(before_L.mean()), float(objective.cost_L(rank_LE).mean())
    moved = migration_between(slot_of_expert_LE, new_slot_LE, ranks).experts_moved
    apply, reason = _verdict(bool(counts_LSE.any()), moved, before, after, config)
    return Proposal(new_slot_LE, before, after, moved, apply, reason)


def _verdict(traffic: bool, moved: int, before: float, after: float, config: PlacementConfig) -> tuple[bool, str]:
    if not traffic:
        return False, "the window is empty"
    if moved == 0:
        return False, "no expert would move"
    if config.policy in _BY_LOAD_ALONE:
        return True, "the packing differs"
    gain = 1 - after / before  # before > after >= 0: each changed layer costs less
    apply = gain > config.min_gain
    return apply, f"gain {gain:.2%} {'exceeds' if apply else 'does not exceed'} min_gain {config.min_gain:.2%}"


def assign_slots(rank_LE: np.ndarray, old_slot_LE: np.ndarray, ranks: int) -> np.ndarray:
    """Return the slots for a placement given by ranks, with E / R experts on every rank.

    An expert that stays on its rank keeps its slot. Arriving experts fill the vacated slots of their rank, both in
    ascending order. Axis M: the experts of all layers that change rank.
    """
    new_slot_LE = old_slot_LE.copy()
    layer_M, expert_M = np.nonzero(rank_LE != rank_of_expert(old_slot_LE, ranks))
    vacated_M = old_slot_LE[layer_M, expert_M]
    arrivals_M = np.lexsort((expert_M, rank_LE[layer_M, expert_M], layer_M))
    new_slot_LE[layer_M[arrivals_M], expert_M[arrivals_M]] = vacated_M[np.lexsort((vacated_M, layer_M))]
    return new_slot_LE
