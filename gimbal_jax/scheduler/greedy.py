"""Gimbal's online heuristic (paper 5.3): experts by falling load, each to the rank with the lowest score."""

from __future__ import annotations

import numpy as np

from gimbal_jax.scheduler.objective import Objective

_TIE = 1e-12
"""Scores this close are equal: far above rounding error, far below what one token changes."""


def greedy_rank_LE(objective: Objective) -> np.ndarray:
    """Rank of each expert, E / R experts on each rank.

    The score of expert e on rank r is what the choice adds to the objective, less what is the
    same on every rank: ``fixed_LER`` + ``beta`` times
    w * (2 * p_r + w) / R for the load term "square", max(p_1, .., p_r + w, .., p_R) for "max".
    w is e's load in units of the mean rank load. p_r is the projected load of r in the same unit:
    experts already chosen count where they go, those still to come where they are today, e itself
    nowhere. Projecting from the placement in force is ours: from empty ranks, several times as many
    experts move for the same balance. Ties: stay, then the rank that has fewer experts so far.
    """
    beta, ranks = objective.config.beta, objective.ranks
    old_rank_LE, weight_LE, fixed_LER = objective.old_rank_LE, objective.weight_LE, objective.fixed_LER
    layers, experts = weight_LE.shape

    layer_L = np.arange(layers)
    projected_LR = objective.load_LR(old_rank_LE)
    held_LR = np.zeros((layers, ranks), dtype=np.int64)
    rank_LE = np.empty_like(old_rank_LE)
    for expert_L in np.argsort(-weight_LE, axis=1, kind="stable").T:
        weight_L1 = weight_LE[layer_L, expert_L][:, None]
        moves_LR = old_rank_LE[layer_L, expert_L][:, None] != np.arange(ranks)
        projected_LR -= weight_L1 * ~moves_LR
        match objective.config.load_term:
            case "square":
                load_LR = weight_L1 * (2 * projected_LR + weight_L1) / ranks
            case "max":
                load_LR = np.maximum(projected_LR + weight_L1, projected_LR.max(axis=1, keepdims=True))
        score_LR = fixed_LER[layer_L, expert_L] + beta * load_LR
        score_LR[held_LR == experts // ranks] = np.inf
        tied_LR = score_LR <= score_LR.min(axis=1, keepdims=True) + _TIE
        choice_L = np.where(tied_LR, held_LR + experts * moves_LR, np.inf).argmin(axis=1)
        rank_LE[layer_L, expert_L] = choice_L
        projected_LR[layer_L, choice_L] += weight_L1[:, 0]
        held_LR[layer_L, choice_L] += 1
    return rank_LE
