"""Ranks of one source are alike to the objective: which of them is called which is free, and decides who moves."""

from __future__ import annotations

import numpy as np

from gimbal_jax.scheduler.assignment import assign


def fewest_moves_rank_LE(rank_LE: np.ndarray, old_rank_LE: np.ndarray, ranks: int, sources: int) -> np.ndarray:
    """The same sets of experts, dealt to the ranks of each source so that most experts stay where they are (ours).

    Communication and rank loads stay as they are. Nothing changes where nothing is gained.
    """
    tp = ranks // sources
    rank_LE = rank_LE.copy()
    for layer, (rank_E, old_rank_E) in enumerate(zip(rank_LE, old_rank_LE, strict=True)):
        stays_RR = np.zeros((ranks, ranks), dtype=np.int64)
        np.add.at(stays_RR, (rank_E, old_rank_E), 1)
        name_R = np.arange(ranks)
        for first in range(0, ranks, tp):
            stays_TT = stays_RR[first : first + tp, first : first + tp]
            name_T = assign(stays_TT, capacity=1)
            if stays_TT[np.arange(tp), name_T].sum() > stays_TT.trace():
                name_R[first : first + tp] = first + name_T
        rank_LE[layer] = name_R[rank_E]
    return rank_LE
