from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.config import LoadTerm, PlacementConfig
from gimbal_jax.scheduler.objective import placement_cost_L, window_objective
from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.scheduler.traffic import imbalance_L, rank_of_expert, remote_share
from tests.scheduler.windows import any_SR, one_node_SR, random_placement, traffic

CONFIG = PlacementConfig(alpha=100.0, beta=10.0, gamma=1.0)


def test_objective_worked_example():
    # experts 0 and 3 change places: ranks carry 7 and 13 tokens, mean 10; 12 of 20 tokens are remote; 2 of 4 move
    counts_LSE = np.array([[[10, 1, 0, 4], [0, 2, 3, 0]]])
    old_LE, new_LE = static_placement(1, 4, 2), np.array([[3, 1, 2, 0]])
    cost_L = placement_cost_L(counts_LSE, new_LE, old_LE, one_node_SR(counts_LSE, 2), CONFIG)
    assert cost_L == pytest.approx([100 * 12 / 20 + 10 * 0.3**2 + 0.5])
    # by the fullest rank: 13 is 30 % above the mean
    by_fullest = replace(CONFIG, load_term="max")
    cost_L = placement_cost_L(counts_LSE, new_LE, old_LE, one_node_SR(counts_LSE, 2), by_fullest)
    assert cost_L == pytest.approx([60 + 10 * 0.3 + 0.5])


def test_moves_within_a_rank_are_free_and_an_empty_layer_has_only_moves():
    counts_LSE = np.array([[[5, 5, 5, 5]], [[0, 0, 0, 0]]])
    old_LE, new_LE = static_placement(2, 4, 2), np.array([[1, 0, 3, 2], [2, 1, 0, 3]])
    assert placement_cost_L(counts_LSE, new_LE, old_LE, one_node_SR(counts_LSE, 2), CONFIG).tolist() == [0.0, 0.5]


@given(traffic())
def test_terms_agree_with_the_reported_statistics(case):
    counts_LSE, old_LE, ranks = case
    new_LE = random_placement(np.random.default_rng(0), *old_LE.shape)

    def cost_L(alpha: float = 0.0, beta: float = 0.0, gamma: float = 0.0, term: LoadTerm = "square") -> np.ndarray:
        config = PlacementConfig(alpha=alpha, beta=beta, gamma=gamma, load_term=term)
        return placement_cost_L(counts_LSE, new_LE, old_LE, one_node_SR(counts_LSE, ranks), config)

    total_L = counts_LSE.sum(axis=(1, 2))
    remote = (cost_L(alpha=1.0) * total_L).sum() / max(total_L.sum(), 1)
    assert remote == pytest.approx(remote_share(counts_LSE, new_LE, ranks))
    balanced_L = imbalance_L(counts_LSE, new_LE, ranks) == 1.0
    assert ((cost_L(beta=1.0) < 1e-12) == balanced_L).all()
    moved_LE = rank_of_expert(new_LE, ranks) != rank_of_expert(old_LE, ranks)
    assert cost_L(gamma=1.0) == pytest.approx(moved_LE.mean(axis=1))
    assert cost_L(beta=1.0, term="max") == pytest.approx(imbalance_L(counts_LSE, new_LE, ranks) - 1)


@given(traffic(), st.integers(0, 2**32 - 1))
def test_comm_is_the_mean_distance_of_expert_tokens(case, seed):
    counts_LSE, old_LE, ranks = case
    apart_SR = any_SR(counts_LSE, ranks, seed)
    new_LE = random_placement(np.random.default_rng(seed), *old_LE.shape)
    rank_LE = rank_of_expert(new_LE, ranks)
    comm_L = np.zeros(len(counts_LSE))
    for l, s, e in np.ndindex(counts_LSE.shape):
        comm_L[l] += counts_LSE[l, s, e] * apart_SR[s, rank_LE[l, e]]
    comm_L /= np.maximum(counts_LSE.sum(axis=(1, 2)), 1)
    assert window_objective(counts_LSE, old_LE, apart_SR, CONFIG).comm_L(rank_LE) == pytest.approx(comm_L, abs=1e-9)
    only_comm = PlacementConfig(alpha=1.0, beta=0.0, gamma=0.0)
    cost_L = placement_cost_L(counts_LSE, new_LE, old_LE, apart_SR, only_comm)
    assert cost_L == pytest.approx(comm_L, abs=1e-9)


@given(traffic(), st.floats(0, 0.99))
def test_on_one_node_comm_equals_the_remote_share_exactly(case, smoothing):
    """Also for smoothed windows, whose counts are fractions that no longer add up exactly."""
    counts_LSE, old_LE, ranks = case
    counts_LSE = counts_LSE + smoothing * counts_LSE[::-1] / 3
    total_L1 = np.maximum(counts_LSE.sum(axis=(1, 2)), 1)[:, None]
    own_LER = np.repeat(counts_LSE.transpose(0, 2, 1), ranks // counts_LSE.shape[1], axis=2)
    expected_LER = (counts_LSE.sum(axis=1)[:, :, None] - own_LER) / total_L1[:, :, None]
    found = window_objective(counts_LSE, old_LE, one_node_SR(counts_LSE, ranks), CONFIG)
    assert np.array_equal(found.comm_LER, expected_LER)


@given(traffic(), st.integers(0, 2**32 - 1))
def test_cost_is_the_fixed_cost_of_the_experts_plus_the_load(case, seed):
    """Greedy, refined and exact work on fixed_LER and weight_LE; the sum of these must be the objective."""
    counts_LSE, old_LE, ranks = case
    rank_LE = rank_of_expert(random_placement(np.random.default_rng(0), *old_LE.shape), ranks)
    objective = window_objective(counts_LSE, old_LE, any_SR(counts_LSE, ranks, seed), CONFIG)
    for layer, rank_E in enumerate(rank_LE):
        fixed = sum(objective.fixed_LER[layer, expert, rank] for expert, rank in enumerate(rank_E))
        load_R = np.bincount(rank_E, weights=objective.weight_LE[layer], minlength=ranks)
        expected = fixed + CONFIG.beta * np.mean((load_R - load_R.mean()) ** 2)
        assert objective.cost_L(rank_LE)[layer] == pytest.approx(expected)
        assert objective.of_layers(np.array([layer])).cost_L(rank_E[None])[0] == pytest.approx(expected)
