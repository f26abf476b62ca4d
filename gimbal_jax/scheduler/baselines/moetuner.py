"""MoETuner's placement (Go and Mahajan 2025, arXiv:2502.06643), an offline baseline of the paper.

Axes: L MoE layers, E experts, R ranks, C clusters of experts, one per rank.
"""

from __future__ import annotations

import numpy as np

from gimbal_jax.scheduler.assignment import assign
from gimbal_jax.scheduler.eplb import packed_rank_LE
from gimbal_jax.scheduler.placement import assign_slots, static_placement


def moetuner_placement(load_LE: np.ndarray, transitions_LEE: np.ndarray, ranks: int) -> np.ndarray:
    """Return slot_of_expert_LE from a profile: balanced clusters per layer, then one rank for each cluster.

    ``transitions_LEE`` [L-1, E, E] counts (token, expert of layer l, expert of layer l + 1) triples, so a token counts
    k * k times with k experts per token. The clusters of a layer are packed by load with E / R experts each. They go
    to ranks so that most transitions stay on their rank, over all layers.

    Ours: the packing is the longest-processing-time rule, while MoETuner solves an integer program. All ranks are
    equally far apart, so the cost of two layers depends only on which of their clusters meet. A Viterbi search over
    the R! orders of every layer would then find the best matching of each layer to the previous one. The matching
    here is exact, and fast for any R.
    Raises ValueError for a profile of another shape.
    """
    layers, experts = load_LE.shape
    if transitions_LEE.shape != (layers - 1, experts, experts):
        raise ValueError(f"transitions must be {(layers - 1, experts, experts)}, not {transitions_LEE.shape}")
    cluster_LE = packed_rank_LE(load_LE, ranks)
    rank_LE = cluster_LE.copy()
    for layer in range(1, layers):
        flow_RC = _flow(transitions_LEE[layer - 1], rank_LE[layer - 1], cluster_LE[layer], ranks)
        rank_LE[layer] = assign(flow_RC.T, 1)[cluster_LE[layer]]
    return assign_slots(rank_LE, static_placement(layers, experts, ranks), ranks)


def _flow(transitions_EE: np.ndarray, rank_E: np.ndarray, cluster_E: np.ndarray, ranks: int) -> np.ndarray:
    """Return the transitions from each rank [R] to each cluster [C] of the next layer."""
    flow_RC = np.zeros((ranks, ranks), transitions_EE.dtype)
    np.add.at(flow_RC, (rank_E[:, None], cluster_E[None, :]), transitions_EE)
    return flow_RC
