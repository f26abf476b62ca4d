"""DeepSeek's EPLB without redundant experts: balanced packing per layer (github.com/deepseek-ai/EPLB)."""

from __future__ import annotations

import numpy as np


def packed_rank_LE(load_LE: np.ndarray, ranks: int) -> np.ndarray:
    """Rank of each expert: by falling load, each to the least loaded rank that has room; ties to the lower rank.

    Every rank gets E / R experts. Knows neither sources nor the placement in force.
    """
    layers, experts = load_LE.shape
    layer_L = np.arange(layers)
    packed_LR = np.zeros((layers, ranks))
    held_LR = np.zeros((layers, ranks), dtype=np.int64)
    rank_LE = np.empty((layers, experts), dtype=np.int32)
    for expert_L in np.argsort(-load_LE, axis=1, kind="stable").T:
        choice_L = packed_LR.argmin(axis=1)
        rank_LE[layer_L, expert_L] = choice_L
        packed_LR[layer_L, choice_L] += load_LE[layer_L, expert_L]
        held_LR[layer_L, choice_L] += 1
        packed_LR[held_LR == experts // ranks] = np.inf
    return rank_LE
