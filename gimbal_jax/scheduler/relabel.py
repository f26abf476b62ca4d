"""Permutation of equivalent ranks so that a new placement moves as few experts as possible (ours)."""

from __future__ import annotations

import numpy as np

from gimbal_jax.scheduler.assignment import assign


def fewest_moves_rank_LE(rank_LE: np.ndarray, old_rank_LE: np.ndarray, distance_SR: np.ndarray) -> np.ndarray:
    """Return ``rank_LE`` with the ranks permuted so that most experts stay where they are.

    Only equivalent ranks are permuted: ranks with the same column of ``distance_SR``, which are the ranks of one
    source, or the part of them on one node. So communication and rank loads do not change. A permutation that saves no
    move is not applied.
    """
    ranks = distance_SR.shape[1]
    kind_R = np.unique(distance_SR, axis=1, return_inverse=True)[1].ravel()
    groups = [np.flatnonzero(kind_R == kind) for kind in range(kind_R.max() + 1)]
    rank_LE = rank_LE.copy()
    for layer, (rank_E, old_rank_E) in enumerate(zip(rank_LE, old_rank_LE, strict=True)):
        # Experts that would stay if new rank i took the name of old rank j.
        stays_RR = np.zeros((ranks, ranks), dtype=np.int64)
        np.add.at(stays_RR, (rank_E, old_rank_E), 1)
        name_R = np.arange(ranks)
        for rank_T in groups:  # T: the ranks of the group
            stays_TT = stays_RR[np.ix_(rank_T, rank_T)]
            name_T = assign(stays_TT, capacity=1)
            if stays_TT[np.arange(len(rank_T)), name_T].sum() > stays_TT.trace():
                name_R[rank_T] = rank_T[name_T]
        rank_LE[layer] = name_R[rank_E]
    return rank_LE
