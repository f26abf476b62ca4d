import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.scheduler.assignment import assign


def gain(gain_NC: np.ndarray, group_N: np.ndarray) -> float:
    return float(gain_NC[np.arange(len(group_N)), group_N].sum())


def test_full_groups_push_the_cheapest_item_on():
    # All want group 0. Item 1 loses least by leaving, 2 - 1.
    gain_NC = np.array([[9, 1], [2, 1], [5, 0]])
    assert assign(gain_NC, 3).tolist() == [0, 0, 0]
    assert assign(gain_NC, 2).tolist() == [0, 1, 0]


def test_a_chain_of_moves_can_be_the_cheapest():
    # Groups 0 and 1 are full of items that like them. Item 2 leaves 0 for 1 at no loss, and item 4 makes room in 1.
    gain_NC = np.array([[9, 0, 0], [9, 0, 0], [9, 9, 0], [0, 9, 0], [0, 9, 8]])
    assert assign(gain_NC, 2).tolist() == [0, 0, 1, 1, 2]


@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 2), st.booleans(), st.integers(0, 2**32 - 1))
def test_equals_brute_force(items, groups, slack, whole, seed):
    rng = np.random.default_rng(seed)
    capacity = -(-items // groups) + slack
    gain_NC = rng.integers(-3, 4, size=(items, groups)) if whole else rng.normal(size=(items, groups))
    group_N = assign(gain_NC, capacity)
    assert np.bincount(group_N).max() <= capacity
    allowed = (
        np.array(choice)
        for choice in itertools.product(range(groups), repeat=items)
        if np.bincount(choice).max() <= capacity
    )
    assert gain(gain_NC, group_N) == pytest.approx(max(gain(gain_NC, choice) for choice in allowed))


def test_capacity_one_equals_the_assignment_problem():
    rng = np.random.default_rng(0)
    order = rng.permutation(40)
    assert assign(rng.random((40, 40)) + 2 * np.eye(40)[order], 1).tolist() == order.tolist()


def test_rejects_more_items_than_the_groups_hold():
    with pytest.raises(ValueError, match="2 groups of 1 cannot hold 3 items"):
        assign(np.zeros((3, 2)), 1)
