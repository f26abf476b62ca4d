from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.scheduler.migration import Round, migration_between, plan_rounds
from gimbal_jax.scheduler.placement import assign_slots
from gimbal_jax.scheduler.traffic import rank_of_expert
from tests.scheduler.windows import random_placement


def moves(rounds: list[Round]) -> list[set[tuple[int, int]]]:
    return [set(zip(plan.src_slot.tolist(), plan.dst_slot.tolist(), strict=True)) for plan in rounds]


def test_equal_placements_need_no_rounds():
    assert plan_rounds(np.array([1, 0, 2]), np.array([1, 0, 2]), 3, 2) == []


def test_independent_cycles_share_a_round():
    # experts 0 and 2 swap, experts 1 and 3 swap: two rows each way between the two ranks
    old, new = np.array([0, 1, 2, 3]), np.array([2, 3, 0, 1])
    both = plan_rounds(old, new, 2, rows_per_pair=2)
    assert moves(both) == [{(0, 2), (2, 0), (1, 3), (3, 1)}]
    assert both[0].slot_of_expert_E.tolist() == [2, 3, 0, 1]
    one_each = plan_rounds(old, new, 2, rows_per_pair=1)
    assert sorted(moves(one_each), key=sorted) == [{(0, 2), (2, 0)}, {(1, 3), (3, 1)}]


def test_long_cycle_is_cut_with_one_extra_move():
    # slots 0 -> 2 -> 1 -> 3 -> 0 cross from rank 0 to rank 1 twice
    old, new = np.array([0, 1, 2, 3]), np.array([2, 3, 1, 0])
    whole = plan_rounds(old, new, 2, rows_per_pair=2)
    assert [len(round_moves) for round_moves in moves(whole)] == [4]
    cut = plan_rounds(old, new, 2, rows_per_pair=1)
    assert sum(len(round_moves) for round_moves in moves(cut)) == 5
    assert len(cut) == 2
    assert cut[-1].slot_of_expert_E.tolist() == new.tolist()


def test_swap_within_a_rank_needs_two_rows_per_pair():
    with pytest.raises(ValueError, match="rows_per_pair 1: must be at least 2 to swap experts within a rank"):
        plan_rounds(np.array([0, 1]), np.array([1, 0]), 1, rows_per_pair=1)


def test_migration_lists_slots_and_ranks_of_moved_experts():
    old_LE = np.array([[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]])
    new_LE = np.array([[1, 0, 2, 3], [0, 1, 2, 3], [2, 1, 0, 3]])  # a swap within rank 0, nothing, a real swap
    migration = migration_between(old_LE, new_LE, 2)
    moves = zip(
        migration.layer_M, migration.expert_M, migration.src_slot_M, migration.dst_slot_M,
        migration.src_rank_M, migration.dst_rank_M, strict=True,
    )  # fmt: skip
    assert [tuple(map(int, move)) for move in moves] == [
        (0, 0, 0, 1, 0, 0),
        (0, 1, 1, 0, 0, 0),
        (2, 0, 0, 2, 0, 1),
        (2, 2, 2, 0, 1, 0),
    ]
    assert migration.layers.tolist() == [0, 2]
    assert (migration.experts_moved, migration.sent_bytes(100)) == (2, 200)
    assert migration_between(old_LE, old_LE, 2).sent_bytes(100) == 0


def check_rounds(old_E: np.ndarray, new_E: np.ndarray, ranks: int, rows_per_pair: int) -> int:
    """Runs the rounds on real weights; returns the number of moves."""
    slots = len(old_E)
    weights = np.empty(slots, dtype=np.int64)
    weights[old_E] = np.arange(slots)  # each slot holds its expert's number
    total = 0
    for plan in plan_rounds(old_E, new_E, ranks, rows_per_pair):
        assert set(plan.src_slot.tolist()) == set(plan.dst_slot.tolist())
        assert (plan.src_slot != plan.dst_slot).all()
        assert len(set(plan.dst_slot.tolist())) == len(plan.dst_slot)
        pairs = Counter(zip(plan.src_slot * ranks // slots, plan.dst_slot * ranks // slots, strict=True))
        assert max(pairs.values()) <= rows_per_pair
        weights[plan.dst_slot] = weights[plan.src_slot]
        assert (weights[plan.slot_of_expert_E] == np.arange(slots)).all()
        total += len(plan.src_slot)
    assert (weights[new_E] == np.arange(slots)).all()
    return total


sizes = {"ranks": st.integers(1, 4), "slots": st.integers(1, 12), "seed": st.integers(0, 2**32 - 1)}


@given(rows_per_pair=st.integers(2, 4), **sizes)
def test_rounds_give_exactly_the_new_placement(rows_per_pair, ranks, slots, seed):
    old_E, new_E = random_placement(np.random.default_rng(seed), 2, ranks * slots)
    assert check_rounds(old_E, new_E, ranks, rows_per_pair) >= (old_E != new_E).sum()


@given(rows_per_pair=st.integers(1, 3), **sizes)
def test_one_row_per_pair_suffices_for_changes_of_rank(rows_per_pair, ranks, slots, seed):
    old_LE, wanted_LE = (random_placement(np.random.default_rng(seed + i), 1, ranks * slots) for i in range(2))
    new_LE = assign_slots(rank_of_expert(wanted_LE, ranks), old_LE, ranks)
    check_rounds(old_LE[0], new_LE[0], ranks, rows_per_pair)


@given(**sizes)
def test_high_limit_takes_one_round_and_moves_each_expert_once(ranks, slots, seed):
    old_E, new_E = random_placement(np.random.default_rng(seed), 2, ranks * slots)
    assert check_rounds(old_E, new_E, ranks, rows_per_pair=slots) == (old_E != new_E).sum()
    assert len(plan_rounds(old_E, new_E, ranks, rows_per_pair=slots)) <= 1
