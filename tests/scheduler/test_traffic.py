import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.config import MeshConfig
from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.scheduler.traffic import (
    balancedness_sglang,
    balancedness_vllm,
    expert_pressure_S,
    far_share,
    far_tokens_L,
    imbalance_L,
    merge_windows,
    rank_load_LR,
    rank_of_expert,
    remote_share,
    smooth_windows,
    tokens_LSR,
)
from tests.scheduler.windows import mesh_of, traffic

# one layer, two sources, four experts on two ranks; experts 0 and 3 have changed places
COUNTS_LSE = np.array([[[10, 1, 0, 4], [0, 2, 3, 0]]])
SLOT_LE = np.array([[3, 1, 2, 0]])


def test_traffic_worked_example():
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
    assert expert_pressure_S(counts_LSE, slot_LE, 4, 1, 1, "max").tolist() == [2 + 32, 8 + 128]


def test_far_share_counts_tokens_that_leave_the_node():
    # Four sources of one rank, two on each of two nodes, an expert on each rank.
    counts_LSE = np.arange(16).reshape(1, 4, 4)
    mesh, slot_LE = MeshConfig(dp=4, tp=1, nodes=2), static_placement(1, 4, 4)
    far = (2 + 3) + (6 + 7) + (8 + 9) + (12 + 13)
    assert far_tokens_L(counts_LSE, slot_LE, mesh).tolist() == [far]
    assert far_share(counts_LSE, slot_LE, mesh) == far / 120
    assert far_share(counts_LSE, slot_LE, MeshConfig(dp=4, tp=1)) == 0
    # Of one source on two nodes half of the tokens are on either, so half of them cross wherever they go.
    assert far_share(counts_LSE.sum(axis=1, keepdims=True), slot_LE, MeshConfig(dp=1, tp=4, nodes=2)) == 0.5


def test_max_pressure_takes_the_fullest_rank_of_each_layer():
    # One source of two ranks, the fullest of which changes from layer to layer: waiting adds up over layers.
    counts_LSE = np.array([[[10, 0]], [[0, 6]]])
    assert expert_pressure_S(counts_LSE, static_placement(2, 2, 2), 2, 1, 1).tolist() == [16 / 2]
    assert expert_pressure_S(counts_LSE, static_placement(2, 2, 2), 2, 1, 1, "max").tolist() == [(10 + 6) / 2]
    even_LSE = np.array([[[8, 8]], [[3, 3]]])
    assert expert_pressure_S(even_LSE, static_placement(2, 2, 2), 2, 1, 1, "max").tolist() == [(8 + 3) / 2]


def test_token_routed_to_its_own_engine_in_every_layer_counts_one():
    layers, k, tokens = 3, 2, 7
    counts_LSE = np.zeros((layers, 2, 4), dtype=np.int64)
    counts_LSE[:, 0, :2] = tokens
    counts_LSE[:, 1, 2:] = 2 * tokens
    assert expert_pressure_S(counts_LSE, static_placement(layers, 4, 2), 2, 1, k).tolist() == [tokens, 2 * tokens]


def test_balancedness_of_vllm_and_sglang():
    # Rank loads 30 and 10, then 10 and 10: vLLM adds up the layers, SGLang takes the mean of their ratios.
    counts_LSE, slot_LE = np.array([[[20, 10, 5, 5]], [[5, 5, 5, 5]]]), static_placement(2, 4, 2)
    assert balancedness_vllm(counts_LSE, slot_LE, 2) == (20 + 10) / (30 + 10)
    assert balancedness_sglang(counts_LSE, slot_LE, 2) == pytest.approx((20 / 30 + 1) / 2, abs=1e-5)
    nothing_LSE = np.zeros_like(counts_LSE)
    assert balancedness_vllm(nothing_LSE, slot_LE, 2) == 0.0
    assert balancedness_sglang(nothing_LSE, slot_LE, 2) == 1.0


@given(traffic())
def test_balancedness_of_one_layer_is_the_inverse_of_imbalance(case):
    counts_LSE, slot_LE, ranks = case
    for l in np.flatnonzero(counts_LSE.any(axis=(1, 2))):
        layer = counts_LSE[[l]], slot_LE[[l]], ranks
        assert balancedness_vllm(*layer) == pytest.approx(1 / imbalance_L(*layer)[0])
        assert balancedness_sglang(*layer) == pytest.approx(1 / imbalance_L(*layer)[0], abs=1e-4)


@given(traffic(), st.integers(1, 4))
def test_merging_conserves_tokens_and_loads(case, windows):
    counts_LSE, slot_LE, ranks = case
    counts_WLSE = np.stack([counts_LSE * w for w in range(1, windows + 1)])
    merged_LSE = merge_windows(counts_WLSE)
    assert merged_LSE.sum() == counts_WLSE.sum()
    loads_WLR = [rank_load_LR(window_LSE, slot_LE, ranks) for window_LSE in counts_WLSE]
    assert (rank_load_LR(merged_LSE, slot_LE, ranks) == sum(loads_WLR)).all()


def test_smoothing_of_one_half_halves_each_older_window():
    windows = [np.full((1, 1, 2), n) for n in (8, 4, 2)]
    smoothed = np.zeros((1, 1, 2))
    for window_LSE in windows:
        smoothed = smooth_windows(smoothed, window_LSE, 0.5)
    assert smoothed.tolist() == [[[2 + 4 / 2 + 8 / 4] * 2]]
    assert smooth_windows(windows[0], windows[1], 0.0) is windows[1]


def test_statistics_of_an_empty_window():
    counts_LSE, slot_LE = np.zeros((2, 2, 4), dtype=np.int64), static_placement(2, 4, 2)
    assert imbalance_L(counts_LSE, slot_LE, 2).tolist() == [1.0, 1.0]
    assert remote_share(counts_LSE, slot_LE, 2) == 0.0
    assert far_share(counts_LSE, slot_LE, MeshConfig(2, 1, 2)) == 0.0
    assert expert_pressure_S(counts_LSE, slot_LE, 2, 0, 2).tolist() == [0.0, 0.0]


def test_layers_with_opposite_loads_do_not_cancel_in_max_pressure():
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
    for nodes in (nodes for nodes in range(1, ranks + 1) if ranks % nodes == 0):
        node_R = np.arange(ranks) * nodes // ranks
        far = 0.0
        for l, s, e in np.ndindex(layers, sources, experts):
            own_T = node_R[s * (ranks // sources) : (s + 1) * (ranks // sources)]
            far += counts_LSE[l, s, e] * np.mean(own_T != node_R[slot_LE[l, e] // (experts // ranks)])
        mesh = mesh_of(counts_LSE, ranks, nodes)
        assert far_share(counts_LSE, slot_LE, mesh) == pytest.approx(far / max(counts_LSE.sum(), 1))
    expected = [max(load) / np.mean(load) if any(load) else 1.0 for load in load_LR]
    assert imbalance_L(counts_LSE, slot_LE, ranks) == pytest.approx(expected)
