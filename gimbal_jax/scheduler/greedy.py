"""Gimbal's online heuristic (paper 5.3): experts by falling load, each to the rank with the lowest score.

Axes: L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

from typing import assert_never

import numpy as np

from gimbal_jax.scheduler.objective import Objective

_TIE = 1e-12
"""Scores this close count as equal. It is far above rounding errors and far below the change by one token."""


def greedy_rank_LE(objective: Objective) -> np.ndarray:
    """Return the rank of each expert, E / R experts on each rank.

    The score of expert e on rank r is the increase of the objective, without the parts that are the same on every
    rank: ``fixed_LER`` + ``beta`` * load. The load is w * (2 * p_r + w) / R for the load term "square" and
    max(p_1, .., p_r + w, .., p_R) for "max". w is the load of e in units of the mean rank load. p_r is the projected
    load of r in the same unit. It counts experts that have been placed on their new rank, later experts on their
    current rank, and e nowhere. Ties: e stays if it can, otherwise the rank with fewer experts so far wins.

    The projection from the current placement is ours. From empty ranks, several times as many experts move for the
    same balance.
    """
    beta, ranks = objective.config.beta, objective.ranks
    old_rank_LE, weight_LE, fixed_LER = objective.old_rank_LE, objective.weight_LE, objective.fixed_LER
    layers, experts = weight_LE.shape

    layer_L = np.arange(layers)
    projected_LR = objective.load_LR(old_rank_LE)
    held_LR = np.zeros((layers, ranks), dtype=np.int64)
    rank_LE = np.empty_like(old_rank_LE)
    # One expert of every layer at a time.
    for expert_L in np.argsort(-weight_LE, axis=1, kind="stable").T:
        weight_L1 = weight_LE[layer_L, expert_L][:, None]
        moves_LR = old_rank_LE[layer_L, expert_L][:, None] != np.arange(ranks)
        projected_LR -= weight_L1 * ~moves_LR
        load_term = objective.config.load_term
        match load_term:
            case "square":
                load_LR = weight_L1 * (2 * projected_LR + weight_L1) / ranks
            case "max":
                load_LR = np.maximum(projected_LR + weight_L1, projected_LR.max(axis=1, keepdims=True))
            case _:
                assert_never(load_term)
        score_LR = fixed_LER[layer_L, expert_L] + beta * load_LR
        score_LR[held_LR == experts // ranks] = np.inf  # full
        tied_LR = score_LR <= score_LR.min(axis=1, keepdims=True) + _TIE
        choice_L = np.where(tied_LR, held_LR + experts * moves_LR, np.inf).argmin(axis=1)
        rank_LE[layer_L, expert_L] = choice_L
        projected_LR[layer_L, choice_L] += weight_L1[:, 0]
        held_LR[layer_L, choice_L] += 1
    return rank_LE
