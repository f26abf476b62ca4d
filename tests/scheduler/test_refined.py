from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gimbal_jax.config import PlacementConfig
from gimbal_jax.scheduler.distance import distance_SR
from gimbal_jax.scheduler.greedy import greedy_rank_LE
from gimbal_jax.scheduler.objective import Objective, window_objective
from gimbal_jax.scheduler.placement import assign_slots, static_placement
from gimbal_jax.scheduler.refined import refined_rank_LE, swapped_rank_LE
from gimbal_jax.scheduler.traffic import rank_of_expert
from tests.scheduler.windows import any_SR, mesh_of, one_node_SR, random_placement, skewed_counts, traffic

configs = st.builds(
    PlacementConfig,
    alpha=st.just(1.0),
    beta=st.sampled_from([0.0, 0.0025, 1.0, 10.0]),
    gamma=st.sampled_from([0.0, 0.1, 1.0]),
    load_term=st.sampled_from(["square", "max"]),
)
distances = st.sampled_from([one_node_SR, partial(any_SR, seed=0), partial(any_SR, seed=1)])


def test_refined_worked_example():
    # The mean rank load is 8 and the ranks carry 12 and 4. Swapping 4 and 2 (either) leaves 10 and 6, load 0.0625;
    # swapping 8 and 2 leaves 6 and 10, as good; two moves cost 0.1 * 2 / 4. The first in order is swapped, then
    # nothing more: 8, 2 | 4, 2 cannot be evened.
    counts_LSE = np.array([[[8, 4, 2, 2]]])
    objective = window_objective(
        counts_LSE, static_placement(1, 4, 2), one_node_SR(counts_LSE, 2), PlacementConfig(beta=1.0, gamma=0.1)
    )
    rank_LE = refined_rank_LE(objective)
    assert objective.cost_L(rank_LE) == pytest.approx([0.0625 + 0.05])
    assert objective.move_L(rank_LE) == pytest.approx([0.5])


def test_swaps_repair_a_rank_that_greedy_fills_wrongly():
    # Experts 0 and 1 are wanted by source 1, which holds 2 and 3; the heaviest, 2, is wanted by both alike.
    # Greedy decides on 2 first and keeps it where it is; then only one of 0 and 1 finds room at source 1.
    counts_LSE = np.array([[[0, 0, 10, 1], [8, 8, 10, 0]]])
    objective = window_objective(
        counts_LSE, static_placement(1, 4, 2), one_node_SR(counts_LSE, 2), PlacementConfig(beta=0.0, gamma=0.0)
    )
    assert greedy_rank_LE(objective).tolist() == [[1, 0, 1, 0]]
    assert refined_rank_LE(objective).tolist() == [[1, 1, 0, 0]]


@given(traffic(), configs, distances)
def test_costs_no_more_than_greedy_or_staying_and_keeps_capacities(case, config, distances):
    counts_LSE, slot_LE, ranks = case
    objective = window_objective(counts_LSE, slot_LE, distances(counts_LSE, ranks), config)
    rank_LE = refined_rank_LE(objective)
    assert (np.sort(rank_LE, axis=1) == np.sort(objective.old_rank_LE, axis=1)).all()
    greedy_LE = greedy_rank_LE(objective)
    for other_LE in (objective.old_rank_LE, greedy_LE, swapped_rank_LE(objective, greedy_LE)):
        assert (objective.cost_L(rank_LE) <= objective.cost_L(other_LE) + 1e-11).all()


def best_swap_gain(objective: Objective, rank_LE: np.ndarray, layer: int) -> float:
    """What the best swap of two experts saves, by trying all of them."""
    cost = objective.cost_L(rank_LE)[layer]
    best = 0.0
    for a, b in product(range(rank_LE.shape[1]), repeat=2):
        swapped_LE = rank_LE.copy()
        swapped_LE[layer, [a, b]] = rank_LE[layer, [b, a]]
        best = max(best, cost - objective.cost_L(swapped_LE)[layer])
    return best


@settings(max_examples=40)
@given(traffic(), configs, distances)
def test_search_ends_when_no_swap_saves(case, config, distances):
    counts_LSE, slot_LE, ranks = case
    objective = window_objective(counts_LSE, slot_LE, distances(counts_LSE, ranks), config)
    rank_LE = swapped_rank_LE(objective, objective.old_rank_LE)
    assert (objective.cost_L(rank_LE) <= objective.cost_L(objective.old_rank_LE)).all()
    assert max(best_swap_gain(objective, rank_LE, layer) for layer in range(len(rank_LE))) < 1e-9


@pytest.mark.parametrize("term", ["square", "max"])
def test_search_takes_the_best_swap_each_time(term):
    rng = np.random.default_rng(3)
    counts_LSE = skewed_counts(rng, 1, 2, 12, 10_000)
    config = PlacementConfig(beta=1.0, gamma=0.05, load_term=term)
    objective = window_objective(counts_LSE, random_placement(rng, 1, 12), one_node_SR(counts_LSE, 4), config)
    rank_LE = objective.old_rank_LE.copy()
    while (gain := best_swap_gain(objective, rank_LE, 0)) > 1e-12:
        cost = objective.cost_L(rank_LE)[0]
        for a, b in product(range(12), repeat=2):
            swapped_LE = rank_LE.copy()
            swapped_LE[0, [a, b]] = rank_LE[0, [b, a]]
            if cost - objective.cost_L(swapped_LE)[0] == pytest.approx(gain, abs=1e-12):
                break
        rank_LE = swapped_LE
    assert (rank_LE != objective.old_rank_LE).any()
    assert swapped_rank_LE(objective, objective.old_rank_LE).tolist() == rank_LE.tolist()


@settings(max_examples=40)
@given(traffic(), configs)
def test_no_swap_improves_a_changed_layer(case, config):
    counts_LSE, slot_LE, ranks = case
    objective = window_objective(counts_LSE, slot_LE, one_node_SR(counts_LSE, ranks), config)
    rank_LE = refined_rank_LE(objective)
    for layer in np.flatnonzero((rank_LE != objective.old_rank_LE).any(axis=1)).tolist():
        assert best_swap_gain(objective, rank_LE, layer) < 1e-9


@pytest.mark.parametrize("find", [greedy_rank_LE, refined_rank_LE])
@settings(max_examples=30)
@given(st.sampled_from([1, 2]), st.integers(0, 2**32 - 1))
def test_permuting_experts_or_ranks_permutes_the_answer(find, nodes, seed):
    rng = np.random.default_rng(seed)
    sources, tp, experts = 4, 2, 32
    ranks = sources * tp
    counts_LSE = skewed_counts(rng, 2, sources, experts, 100_003)
    assume(all(len(set(load_E)) == experts for load_E in counts_LSE.sum(axis=1).tolist()))  # equal ones go by number
    old_slot_LE = random_placement(rng, 2, experts)
    config, apart_SR = PlacementConfig(beta=1.0, gamma=0.1), distance_SR(mesh_of(counts_LSE, ranks, nodes), 9.0)
    rank_LE = find(window_objective(counts_LSE, old_slot_LE, apart_SR, config))

    order_E = rng.permutation(experts)
    by_order_LE = find(window_objective(counts_LSE[:, :, order_E], old_slot_LE[:, order_E], apart_SR, config))
    assert by_order_LE.tolist() == rank_LE[:, order_E].tolist()

    # Nodes change places, the sources of each of them, and the ranks of each of those.
    node_N = rng.permutation(nodes)
    source_S = np.concatenate([rng.permutation(sources // nodes) + node * (sources // nodes) for node in node_N])
    name_R = np.concatenate([source * tp + rng.permutation(tp) for source in source_S])
    new_rank_LE = name_R[rank_of_expert(old_slot_LE, ranks)]
    named_slot_LE = assign_slots(new_rank_LE, random_placement(rng, 2, experts), ranks)
    named_counts_LSE = np.empty_like(counts_LSE)
    named_counts_LSE[:, source_S] = counts_LSE
    named_LE = find(window_objective(named_counts_LSE, named_slot_LE, apart_SR, config))
    assert named_LE.tolist() == name_R[rank_LE].tolist()
