"""The placement objective (paper 5.2, in our form): one object that scores the answer of every policy and solver.

Axes: L MoE layers, S sources (DP engines), E experts, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import numpy as np

from gimbal_jax.config import PlacementConfig
from gimbal_jax.scheduler.traffic import rank_of_expert


@dataclass(frozen=True, eq=False)
class Objective:
    """Cost of a placement for one window of traffic, including the moves from the current placement.

    The cost of a layer is ``alpha * comm + beta * load + gamma * move``. All terms are without unit:

    - comm: mean distance of expert tokens from their source; on one node, the share of them that leave its ranks.
    - load: mean over ranks of ((rank load - mean) / mean) ** 2 for ``config.load_term`` "square", and
      (fullest rank - mean) / mean for "max".
    - move: share of experts that change rank.

    The normalisation of each term is ours. comm and load of a layer without traffic are 0.
    """

    comm_LER: np.ndarray
    """Part of comm for expert e on rank r."""
    old_rank_LE: np.ndarray
    """Rank of each expert in the current placement."""
    weight_LE: np.ndarray
    """Load of each expert in units of the mean rank load; a layer's sum is R, or 0 without traffic."""
    config: PlacementConfig
    """Weights and load term."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.comm_LER.shape[2]

    @property
    def move_LER(self) -> np.ndarray:
        """Part of move for expert e on rank r."""
        return (self.old_rank_LE[:, :, None] != np.arange(self.ranks)) / self.old_rank_LE.shape[1]

    @property
    def fixed_LER(self) -> np.ndarray:
        """Cost of expert e on rank r that does not depend on other experts: the objective without its load term."""
        return self.config.alpha * self.comm_LER + self.config.gamma * self.move_LER

    def of_layers(self, layers: np.ndarray) -> Objective:
        """Return the objective of some layers, in the given order."""
        return Objective(self.comm_LER[layers], self.old_rank_LE[layers], self.weight_LE[layers], self.config)

    def comm_L(self, rank_LE: np.ndarray) -> np.ndarray:
        """Return the term comm of each layer."""
        return _sum_L(self.comm_LER, rank_LE)

    def load_LR(self, rank_LE: np.ndarray) -> np.ndarray:
        """Return the load of each rank in units of the mean."""
        return np.einsum("le,ler->lr", self.weight_LE, rank_LE[:, :, None] == np.arange(self.ranks))

    def load_L(self, rank_LE: np.ndarray) -> np.ndarray:
        """Return the term load of each layer, by ``config.load_term``."""
        load_LR = self.load_LR(rank_LE)
        load_term = self.config.load_term
        match load_term:
            case "square":
                return load_LR.var(axis=1)
            case "max":
                return load_LR.max(axis=1) - load_LR.mean(axis=1)
            case _:
                assert_never(load_term)

    def move_L(self, rank_LE: np.ndarray) -> np.ndarray:
        """Return the term move of each layer."""
        return _sum_L(self.move_LER, rank_LE)

    def cost_L(self, rank_LE: np.ndarray) -> np.ndarray:
        """Return the cost of each layer for any assignment [L, E] of experts to ranks, even in number or not."""
        return _sum_L(self.fixed_LER, rank_LE) + self.config.beta * self.load_L(rank_LE)


def _sum_L(cost_LER: np.ndarray, rank_LE: np.ndarray) -> np.ndarray:
    return np.take_along_axis(cost_LER, rank_LE[:, :, None], axis=2).sum(axis=(1, 2))


def window_objective(
    counts_LSE: np.ndarray, old_slot_LE: np.ndarray, distance_SR: np.ndarray, config: PlacementConfig
) -> Objective:
    """Return the objective of a window's counts under ``config``, where ``old_slot_LE`` is the current placement.

    ``distance_SR`` is the distance of each rank from each source, usually from ``distance.distance_SR``. Any numbers
    are allowed.
    """
    ranks = distance_SR.shape[1]
    total_L1 = np.maximum(counts_LSE.sum(axis=(1, 2)), 1)[:, None]
    load_LE = counts_LSE.sum(axis=1)
    # Subtract the tokens that are nearer than 1 instead of adding up distances. So counts that smoothing made
    # fractions are added in the same order on any mesh, with the same rounding.
    nearer_LER = counts_LSE.transpose(0, 2, 1) @ (1 - distance_SR)
    comm_LER = (load_LE[:, :, None] - nearer_LER) / total_L1[:, :, None]
    return Objective(comm_LER, rank_of_expert(old_slot_LE, ranks), load_LE * ranks / total_L1, config)


def placement_cost_L(
    counts_LSE: np.ndarray,
    new_slot_LE: np.ndarray,
    old_slot_LE: np.ndarray,
    distance_SR: np.ndarray,
    config: PlacementConfig,
) -> np.ndarray:
    """Return the cost per layer (see ``Objective``) of serving the window under the new placement after the old one."""
    objective = window_objective(counts_LSE, old_slot_LE, distance_SR, config)
    return objective.cost_L(rank_of_expert(new_slot_LE, objective.ranks))
