"""Ranks that are equally far from every source are alike: which of them is called which decides only who moves."""

from __future__ import annotations

import numpy as np

from gimbal_jax.scheduler.assignment import assign


def fewest_moves_rank_LE(rank_LE: np.ndarray, old_rank_LE: np.ndarray, distance_SR: np.ndarray) -> np.ndarray:
    """The same sets of experts, dealt to ranks that are alike so that most experts stay where they are (ours).

    Alike are ranks with the same column of ``distance_SR``: those of one source, or of its part on one node.
    Communication and rank loads stay as they are. Nothing changes where nothing is gained.
    """
    ranks = distance_SR.shape[1]
    kind_R = np.unique(distance_SR, axis=1, return_inverse=True)[1].ravel()
    groups = [np.flatnonzero(kind_R == kind) for kind in range(kind_R.max() + 1)]
    rank_LE = rank_LE.copy()
    for layer, (rank_E, old_rank_E) in enumerate(zip(rank_LE, old_rank_LE, strict=True)):
        stays_RR = np.zeros((ranks, ranks), dtype=np.int64)
        np.add.at(stays_RR, (rank_E, old_rank_E), 1)
        name_R = np.arange(ranks)
        for rank_T in groups:
            stays_TT = stays_RR[np.ix_(rank_T, rank_T)]
            name_T = assign(stays_TT, capacity=1)
            if stays_TT[np.arange(len(rank_T)), name_T].sum() > stays_TT.trace():
                name_R[rank_T] = rank_T[name_T]
        rank_LE[layer] = name_R[rank_E]
    return rank_LE
