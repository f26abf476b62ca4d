"""Local search by swaps (ours): close to the exact answer, and few experts move.

Axes: L MoE layers, E experts, R ranks, P places for experts on a rank (E / R), A layers that the search still works on.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gimbal_jax.config import LoadTerm
from gimbal_jax.scheduler.greedy import greedy_rank_LE
from gimbal_jax.scheduler.objective import Objective

_STAGES: dict[LoadTerm, tuple[tuple[LoadTerm, float], ...]] = {
    "square": (("square", 0.01), ("square", 0.03), ("square", 0.1), ("square", 0.3), ("square", 1.0)),
    "max": (("square", 0.1), ("square", 1.0), ("square", 10.0), ("square", 100.0), ("max", 1.0)),
}
"""Searches to run for each load term, as (load term, share of ``beta``). Each starts from the previous answer.

Load is settled last, in small steps. With all of ``beta`` from the start, the first swaps would balance the load in any
way and leave no swaps that help communication and moves. With the term "max" alone, the search would end as soon as two
ranks are equally full, so searches with "square" come first."""
_LEAST_GAIN = 1e-12
"""Smaller gains are rounding errors, with which swaps could repeat forever."""


def refined_rank_LE(objective: Objective) -> np.ndarray:
    """Return the rank of each expert, E / R experts on each rank.

    The answer of each layer is the cheapest of three: the current placement, the search from the current placement in
    ``_STAGES``, and the search from greedy's answer, which can end elsewhere. The first of equal ones wins.
    """
    settled_LE = rank_LE = objective.old_rank_LE
    for term, share in _STAGES[objective.config.load_term]:
        config = replace(objective.config, load_term=term, beta=share * objective.config.beta)
        settled_LE = swapped_rank_LE(replace(objective, config=config), settled_LE)
    for other_LE in (settled_LE, swapped_rank_LE(objective, greedy_rank_LE(objective))):
        cheaper_L = objective.cost_L(other_LE) < objective.cost_L(rank_LE) - _LEAST_GAIN
        rank_LE = np.where(cheaper_L[:, None], other_LE, rank_LE)
    return rank_LE


def swapped_rank_LE(objective: Objective, rank_LE: np.ndarray) -> np.ndarray:
    """Swap the two experts of different ranks that save most, in every layer, until no swap saves anything."""
    search = _SwapSearch(objective, rank_LE)
    layer_A = np.arange(len(rank_LE))
    while len(layer_A := search.swap(layer_A)):
        pass
    return search.rank_LE()


class _SwapSearch:
    """The assignment, and the cheapest swap between each pair of ranks."""

    def __init__(self, objective: Objective, rank_LE: np.ndarray) -> None:
        layers, experts = rank_LE.shape
        ranks = objective.ranks
        self._term, self._beta = objective.config.load_term, objective.config.beta
        self._fixed_LER, self._ranks = objective.fixed_LER, ranks
        order_LE = np.argsort(rank_LE, axis=1, kind="stable")
        self._expert_LRP = order_LE.reshape(layers, ranks, experts // ranks)
        self._weight_LRP = np.take_along_axis(objective.weight_LE, order_LE, axis=1).reshape(self._expert_LRP.shape)
        self._load_LR = self._weight_LRP.sum(axis=2)
        fixed_LRPR = self._fixed_LER[np.arange(layers)[:, None, None], self._expert_LRP]
        # Increase of the fixed cost if the expert in a place moves to another rank.
        self._change_LRPR = fixed_LRPR - np.einsum("lrkr->lrk", fixed_LRPR)[..., None]
        # The cheapest swap of each pair of ranks: its cost, and its place on the first of the two ranks.
        self._best_LRR = np.full((layers, ranks, ranks), np.inf)
        self._place_LRR = np.zeros((layers, ranks, ranks), dtype=np.int64)
        self._compare_all(np.arange(layers))

    def rank_LE(self) -> np.ndarray:
        """Return the assignment as the rank of each expert."""
        layers, ranks, places = self._expert_LRP.shape
        rank_LE = np.empty((layers, ranks * places), dtype=np.int32)
        rank_E = np.repeat(np.arange(ranks, dtype=np.int32), places)
        np.put_along_axis(rank_LE, self._expert_LRP.reshape(layers, -1), rank_E[None], axis=1)
        return rank_LE

    def swap(self, layer_A: np.ndarray) -> np.ndarray:
        """Make the best swap of each of these layers. Returns the layers that had one."""
        # Choose the best pair of ranks of each layer, if its swap gains anything.
        best_A = self._best_LRR[layer_A].reshape(len(layer_A), -1)
        pair_A = best_A.argmin(axis=1)
        gains_A = best_A[np.arange(len(layer_A)), pair_A] < -_LEAST_GAIN
        layer_A, pair_A = layer_A[gains_A], pair_A[gains_A]
        a_A, b_A = np.divmod(pair_A, self._ranks)
        at_a = layer_A, a_A, self._place_LRR[layer_A, a_A, b_A]
        at_b = layer_A, b_A, self._place_LRR[layer_A, b_A, a_A]

        # Exchange the two experts, and update loads and costs.
        shift_A = self._weight_LRP[at_a] - self._weight_LRP[at_b]
        self._load_LR[layer_A, a_A] -= shift_A
        self._load_LR[layer_A, b_A] += shift_A
        for array in (self._expert_LRP, self._weight_LRP):
            array[at_a], array[at_b] = array[at_b], array[at_a]
        for at in (at_a, at_b):
            fixed_AR = self._fixed_LER[layer_A, self._expert_LRP[at]]
            self._change_LRPR[at] = fixed_AR - fixed_AR[np.arange(len(layer_A)), at[1]][:, None]
        # Compare the swaps whose cost has changed. With "square", a swap depends on its own two ranks only.
        if self._term == "square":
            self._compare(layer_A, a_A)
            self._compare(layer_A, b_A)
        else:
            self._compare_all(layer_A)
        return layer_A

    def _compare_all(self, layer_A: np.ndarray) -> None:
        """Find the best swap of each pair of ranks of each layer."""
        for rank in range(self._ranks):
            self._compare(layer_A, np.full(len(layer_A), rank))

    def _compare(self, layer_A: np.ndarray, rank_A: np.ndarray) -> None:
        """Find the best swap of one rank of each layer with each other rank of the layer."""
        index_A = np.arange(len(layer_A))
        change_ARPP = self._changes(layer_A, rank_A)
        places = change_ARPP.shape[2]
        pair_AR = change_ARPP.reshape(len(layer_A), self._ranks, places**2).argmin(axis=2)
        own_AR, other_AR = np.divmod(pair_AR, places)
        best_AR = change_ARPP[index_A[:, None], np.arange(self._ranks), own_AR, other_AR]
        best_AR[index_A, rank_A] = np.inf
        self._best_LRR[layer_A, rank_A] = self._best_LRR[layer_A, :, rank_A] = best_AR
        self._place_LRR[layer_A, rank_A] = own_AR
        self._place_LRR[layer_A, :, rank_A] = other_AR

    def _changes(self, layer_A: np.ndarray, rank_A: np.ndarray) -> np.ndarray:
        """Return the change of the objective by each swap [A, R, P, P], by place on the given and on the other rank."""
        weight_ARP = self._weight_LRP[layer_A]
        own_weight_ARP = self._weight_LRP[layer_A, rank_A][:, None]  # R is 1: the same for every other rank
        load_AR = self._load_LR[layer_A]
        own_A1 = load_AR[np.arange(len(layer_A)), rank_A][:, None]
        leave_ARP = self._change_LRPR[layer_A, rank_A].transpose(0, 2, 1)
        come_ARP = self._change_LRPR[layer_A[:, None], np.arange(self._ranks), :, rank_A[:, None]]
        if self._term == "square":
            # With s = w_own - w_other and d = load_other - load_own, the mean square grows by 2 * s * (s + d) / R.
            # Except for the product of both weights, this is a sum of one part for each of the two experts.
            scale, apart_AR1 = 2 * self._beta / self._ranks, (load_AR - own_A1)[..., None]
            leave_ARP = leave_ARP + scale * own_weight_ARP * (own_weight_ARP + apart_AR1)
            come_ARP = come_ARP + scale * weight_ARP * (weight_ARP - apart_AR1)
            change_ARPP = (-2 * scale * own_weight_ARP)[..., None] * weight_ARP[:, :, None]
        else:
            shift_ARPP = own_weight_ARP[..., None] - weight_ARP[:, :, None]
            change_ARPP = np.maximum(own_A1[..., None, None] - shift_ARPP, load_AR[..., None, None] + shift_ARPP)
            np.maximum(change_ARPP, _fullest_other(load_AR, rank_A)[..., None, None], out=change_ARPP)
            change_ARPP -= load_AR.max(axis=1)[:, None, None, None]
            change_ARPP *= self._beta
        change_ARPP += leave_ARP[..., None]
        change_ARPP += come_ARP[:, :, None]
        return change_ARPP


def _fullest_other(load_AR: np.ndarray, rank_A: np.ndarray) -> np.ndarray:
    """Return, for each rank r, the load of the fullest rank other than r and the given one; 0 if there is none."""
    others_AR = load_AR.copy()
    others_AR[np.arange(len(rank_A)), rank_A] = 0.0
    fullest_A = others_AR.argmax(axis=1)
    answer_AR = np.repeat(others_AR.max(axis=1)[:, None], load_AR.shape[1], axis=1)
    others_AR[np.arange(len(rank_A)), fullest_A] = 0.0
    answer_AR[np.arange(len(rank_A)), fullest_A] = others_AR.max(axis=1)
    return answer_AR
