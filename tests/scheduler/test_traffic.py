import numpy as np
import pytest
from hypothesis import given

from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.scheduler.traffic import (
    expert_pressure_S,
    imbalance_L,
    rank_load_LR,
    rank_of_expert,
    remote_share,
    tokens_LSR,
)
from tests.scheduler.windows import traffic

# one layer, two sources, four experts on two ranks; experts 0 and 3 have changed places
COUNTS_LSE = np.array([[[10, 1, 0, 4], [0, 2, 3, 0]]])
SLOT_LE = np.array([[3, 1, 2, 0]])


def test_worked_example():
    assert rank_of_expert(SLOT_LE, 2).tolist() == [[1, 0, 1, 0]]
    assert tokens_LSR(COUNTS_LSE, SLOT_LE, 2).tolist() == [[[5, 10], [2, 3]]]
    assert rank_load_LR(COUNTS_LSE, SLOT_LE, 2).tolist() == [[7, 13]]
    assert imbalance_L(COUNTS_LSE, SLOT_LE, 2).tolist() == [1.3]
    assert remote_share(COUNTS_LSE, SLOT_LE, 2) == (10 + 2) / 20
    # 5 steps, 2 experts per token, one layer
    assert expert_pressure_S(COUNTS_LSE, SLOT_LE, 2, 5, 2).tolist() == [0.7, 1.3]


def test_ranks_of_a_source_are_its_tensor_parallel_group():
    # source 0 owns ranks 0 and 1, source 1 ranks 2 and 3
    counts_LSE = np.array([[[1, 2, 4, 8], [16, 32, 64, 128]]])
    slot_LE = static_placement(1, 4, 4)
    assert remote_share(counts_LSE, slot_LE, 4) == (4 + 8 + 16 + 32) / 255
    assert expert_pressure_S(counts_LSE, slot_LE, 4, 1, 1).tolist() == [1 + 2 + 16 + 32, 4 + 8 + 64 + 128]


def test_token_served_at_home_in_every_layer_weighs_one():
    layers, k, tokens = 3, 2, 7
    counts_LSE = np.zeros((layers, 2, 4), dtype=np.int64)
    counts_LSE[:, 0, :2] = tokens
    counts_LSE[:, 1, 2:] = 2 * tokens
    assert expert_pressure_S(counts_LSE, static_placement(layers, 4, 2), 2, 1, k).tolist() == [tokens, 2 * tokens]


def test_empty_window():
    counts_LSE, slot_LE = np.zeros((2, 2, 4), dtype=np.int64), static_placement(2, 4, 2)
    assert imbalance_L(counts_LSE, slot_LE, 2).tolist() == [1.0, 1.0]
    assert remote_share(counts_LSE, slot_LE, 2) == 0.0
    assert expert_pressure_S(counts_LSE, slot_LE, 2, 0, 2).tolist() == [0.0, 0.0]


def test_trap_15_opposite_layers_do_not_balance_each_other():
    counts_LSE = np.array([[[10, 10, 0, 0]], [[0, 0, 10, 10]]])
    assert imbalance_L(counts_LSE, static_placement(2, 4, 2), 2).tolist() == [2.0, 2.0]


@given(traffic())
def test_every_statistic_equals_a_naive_recount(case):
    counts_LSE, slot_LE, ranks = case
    layers, sources, experts = counts_LSE.shape
    load_LR = np.zeros((layers, ranks), dtype=np.int64)
    pressure_S = np.zeros(sources)
    remote = 0
    for l, s, e in np.ndindex(layers, sources, experts):
        rank = slot_LE[l, e] // (experts // ranks)
        owner = rank // (ranks // sources)
        load_LR[l, rank] += counts_LSE[l, s, e]
        pressure_S[owner] += counts_LSE[l, s, e] / (3 * layers * 2)
        remote += counts_LSE[l, s, e] * (owner != s)
    assert rank_load_LR(counts_LSE, slot_LE, ranks).tolist() == load_LR.tolist()
    assert expert_pressure_S(counts_LSE, slot_LE, ranks, 3, 2) == pytest.approx(pressure_S)
    assert remote_share(counts_LSE, slot_LE, ranks) == pytest.approx(remote / max(counts_LSE.sum(), 1))
    expected = [max(load) / np.mean(load) if any(load) else 1.0 for load in load_LR]
    assert imbalance_L(counts_LSE, slot_LE, ranks) == pytest.approx(expected)
