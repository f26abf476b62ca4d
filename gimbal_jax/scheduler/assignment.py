"""Exact assignment of items to groups of bounded size (minimum-cost flow over the groups).

Axes: N items, C groups.
"""

from __future__ import annotations

import numpy as np


def assign(gain_NC: np.ndarray, capacity: int) -> np.ndarray:
    """Return the group of each item [N] with the largest sum of gains and at most ``capacity`` items per group.

    Every item first takes its best group. While a group is too full, the cheapest chain of items moves on, each to
    the next group of the chain, and the last group of the chain has room. Moves along shortest paths keep the
    assignment optimal for its group sizes (successive shortest paths). ``capacity`` 1 with as many groups as items
    gives the assignment problem. The lower group wins a tie.
    Raises ValueError if the groups cannot hold all items.
    """
    items, groups = gain_NC.shape
    if items > groups * capacity:
        raise ValueError(f"{groups} groups of {capacity} cannot hold {items} items")
    gain_NC = np.asarray(gain_NC, np.float64)
    group_N = gain_NC.argmax(axis=1)
    size_C = np.bincount(group_N, minlength=groups)
    while (size_C > capacity).any():
        path = _cheapest_chain(gain_NC, group_N, size_C, capacity)
        for item, group in path:
            group_N[item] = group
        size_C = np.bincount(group_N, minlength=groups)
    return group_N


def _cheapest_chain(
    gain_NC: np.ndarray, group_N: np.ndarray, size_C: np.ndarray, capacity: int
) -> list[tuple[int, int]]:
    """Return (item, its new group) along the cheapest path from a group that is too full to one with room."""
    items, groups = gain_NC.shape
    loss_NC = gain_NC[np.arange(items), group_N][:, None] - gain_NC
    # The cheapest item to move from each group to each other one, and its loss.
    cost_CC = np.full((groups, groups), np.inf)
    item_CC = np.zeros((groups, groups), np.int64)
    for group in np.unique(group_N):
        members = np.flatnonzero(group_N == group)
        cheapest = loss_NC[members].argmin(axis=0)
        item_CC[group] = members[cheapest]
        cost_CC[group] = loss_NC[item_CC[group], np.arange(groups)]
    # Bellman-Ford. A move may gain, but a cycle cannot. The tolerance keeps rounding errors from looking like gains.
    tolerance = 1e-9 * max(1.0, float(np.abs(gain_NC).max()))
    distance_C = np.where(size_C > capacity, 0.0, np.inf)
    before_C = np.full(groups, -1)
    for _ in range(groups):
        through_CC = distance_C[:, None] + cost_CC
        best_C = through_CC.argmin(axis=0)
        reached_C = through_CC[best_C, np.arange(groups)]
        shorter_C = reached_C < distance_C - tolerance
        if not shorter_C.any():
            break
        distance_C = np.where(shorter_C, reached_C, distance_C)
        before_C = np.where(shorter_C, best_C, before_C)
    # Walk back from the nearest group with room.
    group = int(np.where(size_C < capacity, distance_C, np.inf).argmin())
    chain = []
    while (before := int(before_C[group])) >= 0:
        chain.append((int(item_CC[before, group]), group))
        group = before
    return chain
