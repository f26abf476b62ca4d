import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.scheduler.baselines.moetuner import moetuner_placement
from gimbal_jax.scheduler.eplb import packed_rank_LE
from gimbal_jax.scheduler.traffic import rank_of_expert


def stayed(transitions_LEE: np.ndarray, rank_LE: np.ndarray) -> int:
    same_LEE = rank_LE[:-1, :, None] == rank_LE[1:, None, :]
    return int((transitions_LEE * same_LEE).sum())


def test_moetuner_worked_example():
    # Layer 0 packs {0, 3} and {1, 2}, layer 1 {0, 1} and {2, 3}. 5 + 1 tokens go from {0, 3} to {2, 3} and from {1, 2}
    # to {0, 1}, only 4 from {0, 3} to {0, 1}: so {2, 3} goes to rank 0 and {0, 1} to rank 1.
    load_LE = np.array([[8, 4, 4, 1], [6, 1, 5, 2]])
    assert packed_rank_LE(load_LE, 2).tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    transitions_LEE = np.zeros((1, 4, 4), int)
    transitions_LEE[0, 0, 2] = 5
    transitions_LEE[0, 1, 0] = 1
    transitions_LEE[0, 0, 0] = 4
    slot_LE = moetuner_placement(load_LE, transitions_LEE, 2)
    assert rank_of_expert(slot_LE, 2).tolist() == [[0, 1, 1, 0], [1, 1, 0, 0]]
    # From the contiguous placement: expert 1 and 3 change places in layer 0, both pairs in layer 1.
    assert slot_LE.tolist() == [[0, 3, 2, 1], [2, 3, 0, 1]]


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_equals_brute_force_over_all_orders_of_the_clusters(layers, ranks, slots, seed):
    rng = np.random.default_rng(seed)
    experts = ranks * slots
    load_LE = rng.integers(0, 20, size=(layers, experts))
    transitions_LEE = rng.integers(0, 9, size=(layers - 1, experts, experts))
    slot_LE = moetuner_placement(load_LE, transitions_LEE, ranks)
    rank_LE = rank_of_expert(slot_LE, ranks)
    assert (np.sort(slot_LE, axis=1) == np.arange(experts)).all()
    cluster_LE = packed_rank_LE(load_LE, ranks)
    for rank_E, cluster_E in zip(rank_LE, cluster_LE, strict=True):  # clusters stay together
        assert len(set(zip(rank_E.tolist(), cluster_E.tolist(), strict=True))) == ranks
    orders = itertools.product(itertools.permutations(range(ranks)), repeat=layers)
    best = max(
        stayed(transitions_LEE, np.stack([np.array(o)[c_E] for o, c_E in zip(order, cluster_LE, strict=True)]))
        for order in orders
    )
    assert stayed(transitions_LEE, rank_LE) == best


def test_rejects_a_profile_of_another_shape():
    with pytest.raises(ValueError, match=r"transitions must be \(1, 4, 4\), not \(2, 4, 4\)"):
        moetuner_placement(np.ones((2, 4)), np.ones((2, 4, 4)), 2)
