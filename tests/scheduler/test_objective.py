from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from gimbal_jax.config import LoadTerm, PlacementConfig
from gimbal_jax.scheduler.objective import placement_cost_L, window_objective
from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.scheduler.traffic import imbalance_L, rank_of_expert, remote_share
from tests.scheduler.windows import random_placement, traffic

CONFIG = PlacementConfig(alpha=100.0, beta=10.0, gamma=1.0)


def test_worked_example():
    # experts 0 and 3 change places: ranks carry 7 and 13 tokens, mean 10; 12 of 20 tokens are remote; 2 of 4 move
    counts_LSE = np.array([[[10, 1, 0, 4], [0, 2, 3, 0]]])
    old_LE, new_LE = static_placement(1, 4, 2), np.array([[3, 1, 2, 0]])
    cost_L = placement_cost_L(counts_LSE, new_LE, old_LE, 2, CONFIG)
    assert cost_L == pytest.approx([100 * 12 / 20 + 10 * 0.3**2 + 0.5])
    # by the fullest rank: 13 is 30 % above the mean
    by_fullest = replace(CONFIG, load_term="max")
    assert placement_cost_L(counts_LSE, new_LE, old_LE, 2, by_fullest) == pytest.approx([60 + 10 * 0.3 + 0.5])


def test_moves_within_a_rank_are_free_and_an_empty_layer_has_only_moves():
    counts_LSE = np.array([[[5, 5, 5, 5]], [[0, 0, 0, 0]]])
    old_LE, new_LE = static_placement(2, 4, 2), np.array([[1, 0, 3, 2], [2, 1, 0, 3]])
    assert placement_cost_L(counts_LSE, new_LE, old_LE, 2, CONFIG).tolist() == [0.0, 0.5]


@given(traffic())
def test_terms_agree_with_the_reported_statistics(case):
    counts_LSE, old_LE, ranks = case
    new_LE = random_placement(np.random.default_rng(0), *old_LE.shape)

    def cost_L(alpha: float = 0.0, beta: float = 0.0, gamma: float = 0.0, term: LoadTerm = "square") -> np.ndarray:
        config = PlacementConfig(alpha=alpha, beta=beta, gamma=gamma, load_term=term)
        return placement_cost_L(counts_LSE, new_LE, old_LE, ranks, config)

    total_L = counts_LSE.sum(axis=(1, 2))
    remote = (cost_L(alpha=1.0) * total_L).sum() / max(total_L.sum(), 1)
    assert remote == pytest.approx(remote_share(counts_LSE, new_LE, ranks))
    balanced_L = imbalance_L(counts_LSE, new_LE, ranks) == 1.0
    assert ((cost_L(beta=1.0) < 1e-12) == balanced_L).all()
    moved_LE = rank_of_expert(new_LE, ranks) != rank_of_expert(old_LE, ranks)
    assert cost_L(gamma=1.0) == pytest.approx(moved_LE.mean(axis=1))
    assert cost_L(beta=1.0, term="max") == pytest.approx(imbalance_L(counts_LSE, new_LE, ranks) - 1)


@given(traffic())
def test_the_cost_is_what_the_experts_cost_plus_the_load(case):
    """Greedy, refined and exact work on fixed_LER and weight_LE; the sum of these must be the objective."""
    counts_LSE, old_LE, ranks = case
    rank_LE = rank_of_expert(random_placement(np.random.default_rng(0), *old_LE.shape), ranks)
    objective = window_objective(counts_LSE, old_LE, ranks, CONFIG)
    for layer, rank_E in enumerate(rank_LE):
        fixed = sum(objective.fixed_LER[layer, expert, rank] for expert, rank in enumerate(rank_E))
        load_R = np.bincount(rank_E, weights=objective.weight_LE[layer], minlength=ranks)
        expected = fixed + CONFIG.beta * np.mean((load_R - load_R.mean()) ** 2)
        assert objective.cost_L(rank_LE)[layer] == pytest.approx(expected)
        assert objective.of_layers(np.array([layer])).cost_L(rank_E[None])[0] == pytest.approx(expected)
