"""The placement objective (paper 5.2, in our form): one function that scores any placement."""

from __future__ import annotations

import numpy as np

from gimbal_jax.config import PlacementConfig
from gimbal_jax.scheduler.traffic import rank_load_LR, rank_of_expert, remote_tokens_L


def placement_cost_L(
    counts_LSE: np.ndarray,
    new_slot_LE: np.ndarray,
    old_slot_LE: np.ndarray,
    ranks: int,
    config: PlacementConfig,
) -> np.ndarray:
    """Cost of serving the window under the new placement, coming from the old one, per layer.

    ``alpha * comm + beta * load + gamma * move``, all without units:
    comm = share of expert tokens that leave their source's ranks,
    load = mean over ranks of ((rank load - mean) / mean) ** 2,
    move = share of experts that change rank.
    The normalisation of each term is ours. A layer without traffic has no comm and no load.
    """
    experts = new_slot_LE.shape[-1]
    total_L = np.maximum(counts_LSE.sum(axis=(1, 2)), 1)
    comm_L = remote_tokens_L(counts_LSE, new_slot_LE, ranks) / total_L
    load_LR = rank_load_LR(counts_LSE, new_slot_LE, ranks)
    load_L = np.var(load_LR * ranks / total_L[:, None], axis=1)
    moved_LE = rank_of_expert(new_slot_LE, ranks) != rank_of_expert(old_slot_LE, ranks)
    return config.alpha * comm_L + config.beta * load_L + config.gamma * moved_LE.sum(axis=1) / experts
