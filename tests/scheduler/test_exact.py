from functools import partial
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gimbal_jax.config import PlacementConfig
from gimbal_jax.scheduler.exact import exact_answer
from gimbal_jax.scheduler.objective import window_objective
from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.scheduler.refined import refined_rank_LE
from gimbal_jax.scheduler.windows import WindowConfig, synthetic_windows
from tests.scheduler.windows import any_SR, one_node_SR, random_placement, skewed_counts

WEIGHTS = [(1.0, 1.0, 0.1), (1.0, 0.0025, 1.0), (1.0, 10.0, 0.0)]
terms = st.sampled_from(["square", "max"])


def config_of(weights: tuple[float, float, float], term: str) -> PlacementConfig:
    alpha, beta, gamma = weights
    return PlacementConfig(alpha=alpha, beta=beta, gamma=gamma, load_term=term)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(2, 1), (1, 3), (3, 1)]),
    st.integers(1, 2),
    st.sampled_from([*WEIGHTS, (0.0, 1.0, 0.0)]),
    terms,
    st.sampled_from([one_node_SR, partial(any_SR, seed=0), partial(any_SR, seed=1)]),
    st.integers(0, 2**32 - 1),
)
def test_exact_equals_brute_force(mesh, slots, weights, term, distances, seed):
    """Refined, which is a heuristic, is at most half above it, and never above staying."""
    sources, tp = mesh
    ranks, experts = sources * tp, sources * tp * slots
    rng = np.random.default_rng(seed)
    counts_LSE = skewed_counts(rng, 1, sources, experts, 300)
    old_slot_LE, config = random_placement(rng, 1, experts), config_of(weights, term)
    objective = window_objective(counts_LSE, old_slot_LE, distances(counts_LSE, ranks), config)
    answer = exact_answer(objective, gap=0.0)
    orders = set(permutations(np.repeat(np.arange(ranks), slots).tolist()))
    cheapest = min(objective.cost_L(np.array([order]))[0] for order in orders)
    assert answer.status_L == ("optimal",)
    # The tangents of the square are at most 1.3 % below it, and near 0 at most 1e-6.
    slack = objective.config.beta * (0.013 * objective.load_L(answer.rank_LE)[0] + 1e-6) + 1e-6
    assert cheapest - 1e-9 <= answer.cost_L[0] <= cheapest + slack
    assert answer.cost_L[0] - slack <= answer.bound_L[0] <= cheapest + 1e-6
    assert sorted(answer.rank_LE[0]) == sorted(np.repeat(np.arange(ranks), slots))
    refined = objective.cost_L(refined_rank_LE(objective))[0]
    assert cheapest - 1e-9 <= refined <= min(1.5 * cheapest + 1e-9, objective.cost_L(objective.old_rank_LE)[0])


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(WEIGHTS), terms, st.integers(0, 2**32 - 1))
def test_exact_costs_no_more_than_refined(weights, term, seed):
    rng = np.random.default_rng(seed)
    counts_LSE = skewed_counts(rng, 2, 2, 16, 5000)
    objective = window_objective(
        counts_LSE, random_placement(rng, 2, 16), one_node_SR(counts_LSE, 4), config_of(weights, term)
    )
    answer = exact_answer(objective, time_limit_s=5, gap=1e-4)
    refined_L = objective.cost_L(refined_rank_LE(objective))
    assert (answer.bound_L <= refined_L + 1e-9).all()
    assert (answer.cost_L <= refined_L + answer.gap_L * answer.cost_L + 1e-9).all()


def test_bounds_hold_for_tiny_objectives():
    # Without a scale HiGHS stops at 3.5e-5 here and claims that nothing is better.
    counts_LSE = skewed_counts(np.random.default_rng(15), 2, 2, 16, 5000)[:1]
    objective = window_objective(
        counts_LSE, np.arange(16)[None], one_node_SR(counts_LSE, 4), config_of((0.0, 1.0, 0.0), "square")
    )
    answer = exact_answer(objective, gap=1e-4)
    assert answer.bound_L[0] <= answer.cost_L[0] < 3e-5


@pytest.mark.parametrize("weights", [(1.0, 0.0025, 1.0), (1.0, 0.2, 0.1), (1.0, 10.0, 0.03)])
def test_refined_is_within_half_a_percent_and_moves_at_most_a_tenth_more(weights):
    """On four layers of a realistic router, two of them with topics that stick to sources."""
    counts_LSE = np.concatenate(
        [
            next(
                synthetic_windows(WindowConfig(layers=2, persistence=persistence), np.random.default_rng(0))
            ).counts_LSE
            for persistence in (0.0, 1.0)
        ]
    )
    objective = window_objective(
        counts_LSE, static_placement(4, 128, 4), one_node_SR(counts_LSE, 4), config_of(weights, "square")
    )
    answer = exact_answer(objective, time_limit_s=20, gap=1e-3)
    rank_LE = refined_rank_LE(objective)
    excess_L = objective.cost_L(rank_LE) / answer.cost_L - 1
    assert excess_L.mean() < 0.005 and excess_L.max() < 0.02
    assert objective.move_L(rank_LE).sum() <= 1.1 * objective.move_L(answer.rank_LE).sum()


def test_exact_worked_example():
    # Experts 0 and 3 are wanted by the other source; the swap makes every token local and both ranks carry 10.
    counts_LSE = np.array([[[0, 4, 6, 0], [5, 0, 0, 5]]])
    objective = window_objective(
        counts_LSE, np.array([[0, 1, 2, 3]]), one_node_SR(counts_LSE, 2), PlacementConfig(beta=1.0, gamma=0.1)
    )
    steps = []
    answer = exact_answer(
        objective, progress=lambda done, total: steps.append((done, total)), clock=iter([1.0, 3.5]).__next__
    )
    assert answer.rank_LE.tolist() == [[1, 0, 0, 1]]
    assert answer.cost_L == pytest.approx([0.1 * 2 / 4])
    assert answer.gap_L[0] < 1e-4
    assert answer.seconds_L.tolist() == [2.5]
    assert steps == [(1, 1)]


def test_layer_without_traffic_keeps_its_placement():
    counts_LSE = np.zeros((1, 2, 8), dtype=np.int64)
    objective = window_objective(counts_LSE, np.arange(8)[None], one_node_SR(counts_LSE, 4), PlacementConfig())
    answer = exact_answer(objective)
    assert answer.rank_LE.tolist() == objective.old_rank_LE.tolist()
    assert (answer.cost_L.tolist(), answer.bound_L.tolist(), answer.gap_L.tolist()) == ([0.0], [0.0], [0.0])


def test_time_limit_ends_a_search_and_is_reported():
    rng = np.random.default_rng(0)
    counts_LSE = skewed_counts(rng, 1, 2, 128, 50_000)
    config = PlacementConfig(beta=10.0, gamma=0.01, load_term="max")
    objective = window_objective(counts_LSE, random_placement(rng, 1, 128), one_node_SR(counts_LSE, 8), config)
    hurried = exact_answer(objective, time_limit_s=0.3, gap=0.0)
    assert hurried.seconds_L[0] < 5
    assert hurried.status_L[0] in ("time limit", "nothing found")
    assert hurried.gap_L[0] > 0
    at_once = exact_answer(objective, time_limit_s=0.0, gap=0.0)
    assert at_once.status_L == ("nothing found",)
    assert at_once.rank_LE.tolist() == objective.old_rank_LE.tolist()
