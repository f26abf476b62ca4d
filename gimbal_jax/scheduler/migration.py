"""From one placement to another: what moves, and in which rounds, each of which leaves a consistent table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gimbal_jax.scheduler.traffic import rank_of_expert

Cycle = list[int]
"""Slots whose contents move on together: each to the next slot, the last to the first."""


@dataclass(frozen=True, eq=False)
class Round:
    """Moves that happen at once: what is in ``src_slot[i]`` goes to ``dst_slot[i]`` (int32).

    The slots that are written are the slots that are read, so nothing is lost.
    """

    src_slot: np.ndarray
    dst_slot: np.ndarray
    slot_of_expert_E: np.ndarray
    """The layer's table after the round."""


@dataclass(frozen=True, eq=False)
class Migration:
    """What is different in a new placement. M: experts that get another slot, by layer and expert."""

    layer_M: np.ndarray
    expert_M: np.ndarray
    src_slot_M: np.ndarray
    dst_slot_M: np.ndarray
    src_rank_M: np.ndarray
    dst_rank_M: np.ndarray

    @property
    def experts_moved(self) -> int:
        """Experts that change rank; a change of slot within a rank is no move."""
        return int((self.src_rank_M != self.dst_rank_M).sum())

    @property
    def layers(self) -> np.ndarray:
        """MoE layers whose table changes, rising."""
        return np.unique(self.layer_M)

    def sent_bytes(self, expert_bytes: int) -> int:
        """Bytes that leave their rank, with ``expert_bytes`` for the weights of one expert of one layer."""
        return self.experts_moved * expert_bytes


def migration_between(old_slot_LE: np.ndarray, new_slot_LE: np.ndarray, ranks: int) -> Migration:
    """What turns the old placement into the new one."""
    layer_M, expert_M = np.nonzero(old_slot_LE != new_slot_LE)
    changes = layer_M, expert_M
    old_rank_LE, new_rank_LE = rank_of_expert(old_slot_LE, ranks), rank_of_expert(new_slot_LE, ranks)
    return Migration(*changes, old_slot_LE[changes], new_slot_LE[changes], old_rank_LE[changes], new_rank_LE[changes])


def plan_rounds(
    old_slot_of_expert_E: np.ndarray, new_slot_of_expert_E: np.ndarray, ranks: int, rows_per_pair: int
) -> list[Round]:
    """Rounds that turn the old table into the new one, to be run in order.

    No ordered pair (from rank, to rank) moves more than ``rows_per_pair`` rows in a round;
    moves within a rank count too. The cycles of the slot permutation are packed whole, longest
    first, each into the first round with room. One that exceeds the limit alone is cut into
    shorter ones, at one extra move per cut. Raises ValueError if two experts swap
    within a rank and ``rows_per_pair`` is 1.
    """
    slots = len(old_slot_of_expert_E)
    rank_of_slot = [slot * ranks // slots for slot in range(slots)]
    packed: list[list[Cycle]] = []
    used: list[Counter[tuple[int, int]]] = []
    for cycle in sorted(_cycles(old_slot_of_expert_E, new_slot_of_expert_E), key=len, reverse=True):
        earliest = 0  # the pieces of a cut cycle share a slot: one after the other
        for piece in _cut(cycle, rank_of_slot, rows_per_pair):
            rows = Counter((rank_of_slot[src], rank_of_slot[dst]) for src, dst in _moves(piece))
            index = next(
                (i for i in range(earliest, len(used)) if max((used[i] + rows).values()) <= rows_per_pair), len(used)
            )
            if index == len(used):
                packed.append([])
                used.append(Counter())
            packed[index].append(piece)
            used[index] += rows
            earliest = index + 1
    return _rounds(packed, old_slot_of_expert_E)


def _rounds(packed: list[list[Cycle]], slot_of_expert_E: np.ndarray) -> list[Round]:
    rounds = []
    expert_of_slot = np.argsort(slot_of_expert_E)
    for cycles in packed:
        src_slot, dst_slot = np.array([move for cycle in cycles for move in _moves(cycle)], dtype=np.int32).T
        expert_of_slot[dst_slot] = expert_of_slot[src_slot]
        rounds.append(Round(src_slot, dst_slot, np.argsort(expert_of_slot).astype(np.int32)))
    return rounds


def _moves(cycle: Cycle) -> Iterator[tuple[int, int]]:
    return pairwise([*cycle, cycle[0]])


def _cycles(old_slot_of_expert_E: np.ndarray, new_slot_of_expert_E: np.ndarray) -> Iterator[Cycle]:
    """Disjoint cycles of the slots whose content changes."""
    moves = zip(old_slot_of_expert_E.tolist(), new_slot_of_expert_E.tolist(), strict=True)
    destination = {old: new for old, new in moves if old != new}
    while destination:
        start, slot = destination.popitem()
        cycle = [start]
        while slot != start:
            cycle.append(slot)
            slot = destination.pop(slot)
        yield cycle


def _cut(cycle: Cycle, rank_of_slot: list[int], rows_per_pair: int) -> Iterator[Cycle]:
    """Shorter cycles that have the same effect one after the other, each within the limit.

    Running the first n slots as a cycle leaves the content of the last of them in the
    first slot, so the first slot and the rest are again one cycle.
    """
    while True:
        n = _longest_prefix(cycle, rank_of_slot, rows_per_pair)
        if n == 0:
            raise ValueError(f"rows_per_pair must be at least 2 to swap experts within a rank, not {rows_per_pair}")
        yield cycle[:n]
        if n == len(cycle):
            return
        cycle = [cycle[0], *cycle[n:]]


def _longest_prefix(cycle: Cycle, rank_of_slot: list[int], rows_per_pair: int) -> int:
    """Most slots from the start that, closed to a cycle, keep the limit; 0 if none do."""
    longest = 0
    rows: Counter[tuple[int, int]] = Counter()
    for length, (src, dst) in enumerate(pairwise(cycle), start=2):
        pair = rank_of_slot[src], rank_of_slot[dst]
        rows[pair] += 1
        if rows[pair] > rows_per_pair:
            break
        if rows[rank_of_slot[dst], rank_of_slot[cycle[0]]] < rows_per_pair:
            longest = length
    return longest
