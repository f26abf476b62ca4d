"""Gimbal's online heuristic (paper 5.3): experts by falling load, each to the rank with the lowest score."""

from __future__ import annotations

import numpy as np

from gimbal_jax.config import PlacementConfig

_TIE = 1e-12
"""Scores this close are equal: far above rounding error, far below what one token changes."""


def greedy_rank_LE(counts_LSE: np.ndarray, old_rank_LE: np.ndarray, ranks: int, config: PlacementConfig) -> np.ndarray:
    """Rank of each expert for the window's traffic, coming from ``old_rank_LE``; E / R experts per rank.

    The score of expert e on rank r is what the choice adds to ``placement_cost_L``, less what is
    the same on every rank: ``alpha`` * e's remote tokens / all tokens + ``beta`` * w * (2 * p_r + w) / R
    + ``gamma`` / E if r is not e's rank today.
    w is e's load in units of the mean rank load. p_r is the projected load of r in the same unit:
    experts already chosen count where they go, those still to come where they are today, e itself
    nowhere. Projecting from the placement in force is ours: from empty ranks, several times as many
    experts move for the same balance. Ties: stay, then the rank that has fewer experts so far.
    """
    layers, sources, experts = counts_LSE.shape
    rank_R = np.arange(ranks)
    total_L1 = np.maximum(counts_LSE.sum(axis=(1, 2)), 1)[:, None]
    load_LE = counts_LSE.sum(axis=1)
    own_LER = np.repeat(counts_LSE.transpose(0, 2, 1), ranks // sources, axis=2)
    comm_LER = (load_LE[:, :, None] - own_LER) / total_L1[:, :, None]
    moves_LER = old_rank_LE[:, :, None] != rank_R
    fixed_LER = config.alpha * comm_LER + config.gamma * moves_LER / experts
    weight_LE = load_LE * ranks / total_L1

    layer_L = np.arange(layers)
    projected_LR = np.einsum("le,ler->lr", weight_LE, ~moves_LER)
    held_LR = np.zeros((layers, ranks), dtype=np.int64)
    rank_LE = np.empty_like(old_rank_LE)
    for expert_L in np.argsort(-load_LE, axis=1, kind="stable").T:
        weight_L = weight_LE[layer_L, expert_L]
        moves_LR = moves_LER[layer_L, expert_L]
        projected_LR[layer_L, old_rank_LE[layer_L, expert_L]] -= weight_L
        load_term_LR = weight_L[:, None] * (2 * projected_LR + weight_L[:, None]) / ranks
        score_LR = fixed_LER[layer_L, expert_L] + config.beta * load_term_LR
        score_LR[held_LR == experts // ranks] = np.inf
        tied_LR = score_LR <= score_LR.min(axis=1, keepdims=True) + _TIE
        choice_L = np.where(tied_LR, held_LR + experts * moves_LR, np.inf).argmin(axis=1)
        rank_LE[layer_L, expert_L] = choice_L
        projected_LR[layer_L, choice_L] += weight_L
        held_LR[layer_L, choice_L] += 1
    return rank_LE
