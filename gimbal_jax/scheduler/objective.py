"""The placement objective (paper 5.2, in our form): one object that scores what every policy and solver finds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gimbal_jax.config import PlacementConfig
from gimbal_jax.scheduler.traffic import rank_of_expert


@dataclass(frozen=True, eq=False)
class Objective:
    """What a placement costs for one window, coming from the placement in force.

    ``alpha * comm + beta * load + gamma * move`` per layer, all without units:
    comm = mean distance of expert tokens from their source, on one node the share of them that leave its ranks,
    load = mean over ranks of ((rank load - mean) / mean) ** 2, or, by ``config.load_term``,
    (fullest rank - mean) / mean,
    move = share of experts that change rank.
    The normalisation of each term is ours. A layer without traffic has no comm and no load.
    """

    comm_LER: np.ndarray
    """What expert e on rank r adds to comm."""
    old_rank_LE: np.ndarray
    """Rank of each expert in the placement in force."""
    weight_LE: np.ndarray
    """Load of each expert in units of the mean rank load; a layer's sum is R, or 0 without traffic."""
    config: PlacementConfig

    @property
    def ranks(self) -> int:
        return self.comm_LER.shape[2]

    @property
    def move_LER(self) -> np.ndarray:
        """What expert e on rank r adds to move."""
        return (self.old_rank_LE[:, :, None] != np.arange(self.ranks)) / self.old_rank_LE.shape[1]

    @property
    def fixed_LER(self) -> np.ndarray:
        """What expert e on rank r costs, wherever the others are: all of the objective but its load term."""
        return self.config.alpha * self.comm_LER + self.config.gamma * self.move_LER

    def of_layers(self, layers: np.ndarray) -> Objective:
        """The same for some layers only, in this order."""
        return Objective(self.comm_LER[layers], self.old_rank_LE[layers], self.weight_LE[layers], self.config)

    def comm_L(self, rank_LE: np.ndarray) -> np.ndarray:
        return _sum_L(self.comm_LER, rank_LE)

    def load_LR(self, rank_LE: np.ndarray) -> np.ndarray:
        """Load of each rank in units of the mean."""
        return np.einsum("le,ler->lr", self.weight_LE, rank_LE[:, :, None] == np.arange(self.ranks))

    def load_L(self, rank_LE: np.ndarray) -> np.ndarray:
        load_LR = self.load_LR(rank_LE)
        match self.config.load_term:
            case "square":
                return load_LR.var(axis=1)
            case "max":
                return load_LR.max(axis=1) - load_LR.mean(axis=1)

    def move_L(self, rank_LE: np.ndarray) -> np.ndarray:
        return _sum_L(self.move_LER, rank_LE)

    def cost_L(self, rank_LE: np.ndarray) -> np.ndarray:
        """The objective of each layer, of an assignment [L, E] of experts to ranks, balanced in number or not."""
        return _sum_L(self.fixed_LER, rank_LE) + self.config.beta * self.load_L(rank_LE)


def _sum_L(cost_LER: np.ndarray, rank_LE: np.ndarray) -> np.ndarray:
    return np.take_along_axis(cost_LER, rank_LE[:, :, None], axis=2).sum(axis=(1, 2))


def window_objective(
    counts_LSE: np.ndarray, old_slot_LE: np.ndarray, distance_SR: np.ndarray, config: PlacementConfig
) -> Objective:
    """The objective of a window's counts under ``config``, with ``old_slot_LE`` in force.

    ``distance_SR``: of each rank from each source, usually ``distance.distance_SR``; any numbers will do.
    """
    ranks = distance_SR.shape[1]
    total_L1 = np.maximum(counts_LSE.sum(axis=(1, 2)), 1)[:, None]
    load_LE = counts_LSE.sum(axis=1)
    # What is nearer than 1 is taken off: so counts that smoothing made fractions add up in the same order on any mesh.
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
    """Cost per layer of serving the window under the new placement, coming from the old one (see ``Objective``)."""
    objective = window_objective(counts_LSE, old_slot_LE, distance_SR, config)
    return objective.cost_L(rank_of_expert(new_slot_LE, objective.ranks))
