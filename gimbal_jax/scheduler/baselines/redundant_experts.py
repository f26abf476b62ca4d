"""EPLB with redundant experts (github.com/deepseek-ai/EPLB): hot experts get several slots.

The server has one slot per expert and cannot use such a placement.
Axes: L MoE layers, E experts, P slots, G groups of consecutive experts, X nodes of all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gimbal_jax.scheduler.eplb import packed_place


@dataclass(frozen=True, eq=False)
class ReplicatedPlacement:
    """A placement in which hot experts have several slots."""

    expert_of_slot_LP: np.ndarray
    """Expert in each slot, int32; slot p is on rank p // (P / ranks)."""
    replicas_LE: np.ndarray
    """Number of slots that hold each expert, at least 1. The slots share the expert's load evenly."""


def replicated_placement(
    load_LE: np.ndarray, slots: int, ranks: int, groups: int = 1, nodes: int = 1
) -> ReplicatedPlacement:
    """Place the experts and ``slots`` - E redundant ones by EPLB, given the load of each expert.

    The hierarchical policy has three steps. Pack ``groups`` of consecutive experts onto the nodes. On each node, give
    one more replica to the expert with the highest load per replica, until the node's slots are full. Pack the
    replicas onto the node's ranks. One group and one node give the global policy. As in the original, replicas of
    one expert may share a rank.
    Raises ValueError if the sizes do not divide or if there are fewer slots than experts.
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
    # Sort the experts by the nodes that their groups are packed onto.
    size = experts // groups
    place_LG = packed_place(load_LE.reshape(layers, groups, size).sum(axis=2), nodes)
    expert_LE = (np.argsort(place_LG, axis=1)[:, :, None] * size + np.arange(size)).reshape(layers, experts)

    # Replicate and pack on each node. Its experts are numbered in the sorted order.
    load_XE = np.take_along_axis(load_LE, expert_LE, axis=1).reshape(layers * nodes, -1)
    replica_XP, replicas_XE = _replicate(load_XE, slots // nodes)
    share_XP = np.take_along_axis(load_XE / replicas_XE, replica_XP, axis=1)
    packed_XP = np.empty_like(replica_XP)
    np.put_along_axis(packed_XP, packed_place(share_XP, ranks // nodes), replica_XP, axis=1)

    # Back to the original numbers of the experts.
    expert_of_slot_XP = np.take_along_axis(expert_LE.reshape(layers * nodes, -1), packed_XP, axis=1)
    replicas_LE = np.empty_like(expert_LE)
    np.put_along_axis(replicas_LE, expert_LE, replicas_XE.reshape(layers, experts), axis=1)
    return ReplicatedPlacement(expert_of_slot_XP.reshape(layers, slots).astype(np.int32), replicas_LE)


def _replicate(load_XE: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the expert of each replica [X, P] and the replicas per expert [X, E].

    The first E replicas are one of every expert.
    """
    nodes, experts = load_XE.shape
    node_X = np.arange(nodes)
    replica_XP = np.tile(np.arange(slots), (nodes, 1))
    replicas_XE = np.ones_like(load_XE, dtype=np.int64)
    for slot in range(experts, slots):
        hottest_X = (load_XE / replicas_XE).argmax(axis=1)
        replica_XP[:, slot] = hottest_X
        replicas_XE[node_X, hottest_X] += 1
    return replica_XP, replicas_XE
