"""From one placement to another: the experts that move, and rounds of moves that each leave a consistent table.

Axes: L MoE layers, E experts, M experts that move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gimbal_jax.scheduler.traffic import rank_of_expert

Cycle = list[int]
"""Slots whose contents move on together: each to the next slot, and the last to the first."""


@dataclass(frozen=True, eq=False)
class Round:
    """Simultaneous moves within one layer. A round writes exactly the slots that it reads, so no expert is lost."""

    src_slot: np.ndarray
    """Slot that each move reads, int32."""
    dst_slot: np.ndarray
    """Slot that each move writes, int32."""
    slot_of_expert_E: np.ndarray
    """The layer's table after the round, int32."""


@dataclass(frozen=True, eq=False)
class Migration:
    """Difference between two placements: the experts that get another slot, ordered by layer and expert."""

    layer_M: np.ndarray
    """MoE layer of the expert."""
    expert_M: np.ndarray
    """Index of the expert in its layer."""
    src_slot_M: np.ndarray
    """Slot in the old placement."""
    dst_slot_M: np.ndarray
    """Slot in the new placement."""
    src_rank_M: np.ndarray
    """Rank in the old placement."""
    dst_rank_M: np.ndarray
    """Rank in the new placement."""

    @property
    def experts_moved(self) -> int:
        """Number of experts that change rank; a change of slot within a rank does not count."""
        return int((self.src_rank_M != self.dst_rank_M).sum())

    @property
    def layers(self) -> np.ndarray:
        """MoE layers whose table changes, ascending."""
        return np.unique(self.layer_M)

    def sent_bytes(self, expert_bytes: int) -> int:
        """Return the bytes that leave their rank; ``expert_bytes`` is the size of one expert of one layer."""
        return self.experts_moved * expert_bytes


def migration_between(old_slot_LE: np.ndarray, new_slot_LE: np.ndarray, ranks: int) -> Migration:
    """Return the difference between the old and the new placement."""
    layer_M, expert_M = np.nonzero(old_slot_LE != new_slot_LE)
    changes = layer_M, expert_M
    old_rank_LE, new_rank_LE = rank_of_expert(old_slot_LE, ranks), rank_of_expert(new_slot_LE, ranks)
    return Migration(*changes, old_slot_LE[changes], new_slot_LE[changes], old_rank_LE[changes], new_rank_LE[changes])


def plan_rounds(
    old_slot_of_expert_E: np.ndarray, new_slot_of_expert_E: np.ndarray, ranks: int, rows_per_pair: int
) -> list[Round]:
    """Return rounds that turn a layer's old table into its new one if they run in order.

    In a round, no ordered pair (from rank, to rank) moves more than ``rows_per_pair`` rows. Moves within a rank count
    too. The cycles of the slot permutation are packed whole, longest first, each into the first round with room. A
    cycle that exceeds the limit alone is cut into shorter cycles, at one extra move per cut.
    Raises ValueError if two experts swap within a rank and ``rows_per_pair`` is 1.
    """
    slots = len(old_slot_of_expert_E)
    rank_of_slot = [slot * ranks // slots for slot in range(slots)]
    packed: list[list[Cycle]] = []
    used: list[Counter[tuple[int, int]]] = []
    for cycle in sorted(_cycles(old_slot_of_expert_E, new_slot_of_expert_E), key=len, reverse=True):
        earliest = 0  # the pieces of a cut cycle share a slot, so they need different rounds, in order
        for piece in _cut(cycle, rank_of_slot, rows_per_pair):
            rows = Counter((rank_of_slot[src], rank_of_slot[dst]) for src, dst in _moves(piece))
            # The first round with room for the piece, or a new one.
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
    """Return the packed cycles as rounds, with the table after each of them."""
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
    """Yield the disjoint cycles of the slots whose content changes."""
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
    """Yield shorter cycles within the limit that have the effect of ``cycle`` if they run in order.

    If the first n slots run as a cycle, the content of the last of them ends in the first slot. So the first slot and
    the remaining slots form one cycle again.
    """
    while True:
        n = _longest_prefix(cycle, rank_of_slot, rows_per_pair)
        if n == 0:
            raise ValueError(f"rows_per_pair {rows_per_pair}: must be at least 2 to swap experts within a rank")
        yield cycle[:n]
        if n == len(cycle):
            return
        cycle = [cycle[0], *cycle[n:]]


def _longest_prefix(cycle: Cycle, rank_of_slot: list[int], rows_per_pair: int) -> int:
    """Return the largest number of first slots that keep the limit if closed to a cycle; 0 if there is none."""
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
