"""DeepSeek's EPLB (github.com/deepseek-ai/EPLB): balanced packing per layer, with and without redundant experts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


def packed_rank_LE(load_LE: np.ndarray, ranks: int) -> np.ndarray:
    """Rank of each expert: by falling load, each to the least loaded rank that has room; ties to the lower rank.

    Every rank gets E / R experts. Knows neither sources nor the placement in force.
    """
    return _packed_place(load_LE, ranks) // (load_LE.shape[1] // ranks)


def hierarchical_rank_LE(load_LE: np.ndarray, ranks: int, nodes: int) -> np.ndarray:
    """Rank of each expert: packed onto the nodes first, then on each node onto its ranks.

    The hierarchical policy without redundant experts; on one node ``packed_rank_LE``. The original packs
    groups of experts onto the nodes, since in DeepSeek's models a token chooses among few groups, and is not
    hierarchical where the groups do not divide over the nodes. Qwen3-MoE has no groups, so here every
    expert is one.
    Raises ValueError where the ranks do not divide over the nodes.
    """
    experts = load_LE.shape[1]
    groups = experts if nodes > 1 else 1
    packed = replicated_placement(load_LE, experts, ranks, groups, nodes)
    return np.argsort(packed.expert_of_slot_LP, axis=1) // (experts // ranks)


@dataclass(frozen=True, eq=False)
class ReplicatedPlacement:
    """A placement in which hot experts stand in several slots. The server has one slot per expert and cannot use it."""

    expert_of_slot_LP: np.ndarray
    """Logical expert in each slot, int32; slot p is on rank p // (P // R)."""
    replicas_LE: np.ndarray
    """Slots that hold each expert, at least 1; they share its load evenly."""


def replicated_placement(
    load_LE: np.ndarray, slots: int, ranks: int, groups: int = 1, nodes: int = 1
) -> ReplicatedPlacement:
    """EPLB with ``slots`` - E redundant experts, of the load of each expert.

    The hierarchical policy: pack ``groups`` of consecutive experts onto the nodes; on each node
    give one more replica to the expert with the highest load per replica, until its slots are
    full; pack the replicas onto the node's ranks. With one group and one node, the global policy.
    Replicas of one expert may share a rank, as in the original.
    Raises ValueError where the numbers do not divide.
    """
    layers, experts = load_LE.shape
    for name, whole, parts in [
        ("experts", experts, groups),
        ("groups", groups, nodes),
        ("ranks", ranks, nodes),
        ("slots", slots, ranks),
    ]:
        if whole % parts:
            raise ValueError(f"{whole} {name} cannot be split into {parts} equal parts")
    if slots < experts:
        raise ValueError(f"{experts} experts need at least as many slots, not {slots}")
    # Experts in the order of their nodes.
    size = experts // groups
    place_LG = _packed_place(load_LE.reshape(layers, groups, size).sum(axis=2), nodes)
    expert_LE = (np.argsort(place_LG, axis=1)[:, :, None] * size + np.arange(size)).reshape(layers, experts)

    # X: a node of a layer. Its experts are numbered in that order.
    load_XE = np.take_along_axis(load_LE, expert_LE, axis=1).reshape(layers * nodes, -1)
    replica_XP, replicas_XE = _replicate(load_XE, slots // nodes)
    share_XP = np.take_along_axis(load_XE / replicas_XE, replica_XP, axis=1)
    packed_XP = np.empty_like(replica_XP)
    np.put_along_axis(packed_XP, _packed_place(share_XP, ranks // nodes), replica_XP, axis=1)

    expert_of_slot_XP = np.take_along_axis(expert_LE.reshape(layers * nodes, -1), packed_XP, axis=1)
    replicas_LE = np.empty_like(expert_LE)
    np.put_along_axis(replicas_LE, expert_LE, replicas_XE.reshape(layers, experts), axis=1)
    return ReplicatedPlacement(expert_of_slot_XP.reshape(layers, slots).astype(np.int32), replicas_LE)


def _replicate(load_XE: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Expert of each replica [X, P], the first of all experts first, and the replicas of each expert [X, E]."""
    nodes, experts = load_XE.shape
    node_X = np.arange(nodes)
    replica_XP = np.tile(np.arange(slots), (nodes, 1))
    replicas_XE = np.ones_like(load_XE, dtype=np.int64)
    for slot in range(experts, slots):
        hottest_X = (load_XE / replicas_XE).argmax(axis=1)
        replica_XP[:, slot] = hottest_X
        replicas_XE[node_X, hottest_X] += 1
    return replica_XP, replicas_XE


def _packed_place(load_XE: np.ndarray, packs: int) -> np.ndarray:
    """Place of each item, pack * room + order of arrival, as the longest-processing-time rule packs equal numbers."""
    rows, items = load_XE.shape
    room = items // packs
    if room == 1:  # nothing to balance: in order, as in the original
        return np.tile(np.arange(items), (rows, 1))
    row_X = np.arange(rows)
    packed_XR = np.zeros((rows, packs))
    held_XR = np.zeros((rows, packs), dtype=np.int64)
    place_XE = np.empty((rows, items), dtype=np.int64)
    for item_X in np.argsort(-load_XE, axis=1, kind="stable").T:
        choice_X = packed_XR.argmin(axis=1)
        place_XE[row_X, item_X] = choice_X * room + held_XR[row_X, choice_X]
        packed_XR[row_X, choice_X] += load_XE[row_X, item_X]
        held_XR[row_X, choice_X] += 1
        packed_XR[held_XR == room] = np.inf
    return place_XE
