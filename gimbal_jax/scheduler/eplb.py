"""DeepSeek's EPLB (github.com/deepseek-ai/EPLB) without redundant experts: balanced packing of experts, per layer.

Axes: L MoE layers, E experts. In the packing, X stands for independent rows (layers, or nodes of layers), E for the
items of a row and R for its packs.
"""

from __future__ import annotations

import numpy as np


def packed_rank_LE(load_LE: np.ndarray, ranks: int) -> np.ndarray:
    """Return the rank of each expert: by falling load, each to the least loaded rank that has room.

    Every rank gets E / R experts, and the lower rank wins a tie. The result depends neither on the sources of the
    traffic nor on the current placement.
    """
    return packed_place(load_LE, ranks) // (load_LE.shape[1] // ranks)


def hierarchical_rank_LE(load_LE: np.ndarray, ranks: int, nodes: int) -> np.ndarray:
    """Return the rank of each expert: experts packed onto the nodes first, then on each node onto its ranks.

    On one node this is ``packed_rank_LE``. The original packs groups of experts onto the nodes, because in DeepSeek's
    models a token chooses among few groups. It is not hierarchical if the groups do not divide over the nodes.
    Qwen3-MoE has no groups, so here every expert is a group (ours).
    Raises ValueError if the ranks or the experts do not divide over the nodes.
    """
    layers, experts = load_LE.shape
    for name, whole in (("experts", experts), ("ranks", ranks)):
        if whole % nodes:
            raise ValueError(f"{whole} {name} cannot be split into {nodes} equal parts")
    if nodes == 1:
        return packed_rank_LE(load_LE, ranks)
    # Sort the experts by node, pack those of each node onto its ranks, and undo the sort. X: a node of a layer.
    expert_LE = np.argsort(packed_place(load_LE, nodes), axis=1)
    load_XE = np.take_along_axis(load_LE, expert_LE, axis=1).reshape(layers * nodes, -1)
    rank_in_node_LE = packed_rank_LE(load_XE, ranks // nodes).reshape(layers, experts)
    first_rank_E = np.repeat(np.arange(nodes) * (ranks // nodes), experts // nodes)
    rank_LE = np.empty_like(expert_LE)
    np.put_along_axis(rank_LE, expert_LE, rank_in_node_LE + first_rank_E, axis=1)
    return rank_LE


def packed_place(load_XE: np.ndarray, packs: int) -> np.ndarray:
    """Pack the items of each row into packs of equal size by the longest-processing-time rule.

    Returns the place [X, E] of each item: pack * (items per pack) + its order of arrival in the pack.
    """
    rows, items = load_XE.shape
    room = items // packs
    if room == 1:  # nothing to balance: in order, as in the original
        return np.tile(np.arange(items), (rows, 1))
    row_X = np.arange(rows)
    packed_XR = np.zeros((rows, packs))  # load of each pack; infinite once the pack is full
    held_XR = np.zeros((rows, packs), dtype=np.int64)
    place_XE = np.empty((rows, items), dtype=np.int64)
    for item_X in np.argsort(-load_XE, axis=1, kind="stable").T:
        choice_X = packed_XR.argmin(axis=1)
        place_XE[row_X, item_X] = choice_X * room + held_XR[row_X, choice_X]
        packed_XR[row_X, choice_X] += load_XE[row_X, item_X]
        held_XR[row_X, choice_X] += 1
        packed_XR[held_XR == room] = np.inf
    return place_XE
