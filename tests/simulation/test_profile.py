"""Offline placements: the counts of a profile, and placements made from them."""

import numpy as np
import pytest

from gimbal_jax.config import MeshConfig
from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.scheduler.traffic import imbalance_L, rank_of_expert, remote_share
from gimbal_jax.simulation.profile import chosen_JLE, place_offline, tokens_NJ, transitions_LEE
from gimbal_jax.simulation.routing import BANK_TOKENS, RoutingConfig, synthetic_router
from gimbal_jax.simulation.simulate import simulate
from gimbal_jax.simulation.systems import SYSTEMS
from gimbal_jax.simulation.workload import Arrival
from tests.simulation.rig import EXPERTS, LAYERS, ROUTER, TESTBED, FlatCosts, K, arrivals

MESH = MeshConfig(dp=2, tp=2)
STICKY = synthetic_router(RoutingConfig(topics=4, persistence=1.0, trend_s=1e9), LAYERS, EXPERTS, K, seed=1)


def offline(policy, requests, router=ROUTER, earlier=None):
    return place_offline(policy, router, requests, earlier or requests, MESH, np.random.default_rng(0))


def local_transitions(slot_LE, tokens_J):
    """Return the share of a token's pairs of experts in consecutive layers that are on one rank."""
    rank_LE = rank_of_expert(slot_LE, MESH.ranks)
    pairs_LEE = transitions_LEE(ROUTER, tokens_J)
    same_LEE = rank_LE[:-1, :, None] == rank_LE[1:, None, :]
    return (pairs_LEE * same_LEE).sum() / pairs_LEE.sum()


def test_tokens_are_counted_on_their_topic_at_their_source():
    requests = [Arrival(0.0, 10, 4, topic=2), Arrival(5.0, 7, 1, topic=None)]
    assert tokens_NJ(ROUTER, requests, source=1).tolist() == [[0, 0, 0, 0, 10, 3], [0, 0, 7, 0, 0, 0]]


def test_transitions_agree_with_a_count_token_by_token():
    tokens_J = np.array([0, 2.0, 0, 0, 0.5, 0]) * BANK_TOKENS
    expected = np.zeros((LAYERS - 1, EXPERTS, EXPERTS))
    for profile, weight in ((1, 2.0), (4, 0.5)):
        for chosen_Lk in ROUTER.chosen_JNLk[profile]:
            for layer in range(LAYERS - 1):
                for before in chosen_Lk[layer]:
                    expected[layer, before, chosen_Lk[layer + 1]] += weight
    np.testing.assert_allclose(transitions_LEE(ROUTER, tokens_J), expected)


def test_moetuner_balances_the_load_and_keeps_transitions_on_their_rank():
    requests, earlier = arrivals(400), arrivals(400, seed=9)
    slot_LE, same = offline("moetuner", requests, earlier=earlier)
    assert same == tuple(requests)
    tokens_J = tokens_NJ(ROUTER, requests, 0).sum(axis=0)
    counts_LSE = np.tensordot(tokens_J, chosen_JLE(ROUTER), axes=1)[:, None]
    static_LE = static_placement(LAYERS, EXPERTS, MESH.ranks)
    uneven, static_uneven = (imbalance_L(counts_LSE, slots, MESH.ranks) for slots in (slot_LE, static_LE))
    assert (uneven < static_uneven - 0.05).all()
    # The clusters of the last layer go where most transitions stay: no other order of the ranks keeps more.
    by_rank = local_transitions(slot_LE, tokens_J)
    per_rank = EXPERTS // MESH.ranks
    for shift in range(1, MESH.ranks):
        other_LE = slot_LE.copy()
        other_LE[-1] = (other_LE[-1] + shift * per_rank) % EXPERTS
        assert local_transitions(other_LE, tokens_J) <= by_rank


def test_sem_moe_brings_requests_to_their_experts():
    requests = arrivals(300)
    slot_LE, pinned = offline("sem_moe", requests)
    engines = [a.engine for a in pinned]
    assert set(engines) == {0, 1} and max(engines.count(0), engines.count(1)) <= 150
    # All but those that the limit sends elsewhere go with their topic.
    together = [max(np.bincount([a.engine for a in pinned if a.topic == topic])) for topic in range(3)]
    assert sum(together) >= 0.8 * len(requests)

    run = simulate(SYSTEMS["sem_moe"], TESTBED, FlatCosts(), ROUTER, pinned, 0, slot_LE)
    plain = simulate(SYSTEMS["static"], TESTBED, FlatCosts(), ROUTER, requests, 0)
    assert run.remote_share < plain.remote_share - 0.05
    assert run.remote_share == pytest.approx(remote_share(run.counts_LSE, slot_LE, MESH.ranks))


def test_sem_moe_does_not_sort_requests_by_length():
    rng = np.random.default_rng(0)
    lengths = (rng.pareto(1.5, 600) * 50 + 1).astype(int).tolist()
    requests = [Arrival(n / 10, length, length + 1, topic=n % 3) for n, length in enumerate(lengths)]
    _, pinned = offline("sem_moe", requests)
    median_S = [np.median([a.input_tokens for a in pinned if a.engine == source]) for source in (0, 1)]
    assert max(median_S) < 1.5 * min(median_S)


def test_sem_moe_with_topics_that_belong_to_sources():
    requests = [Arrival(n / 10, 30, 5, topic=None) for n in range(100)]
    slot_LE, pinned = offline("sem_moe", requests, router=STICKY)
    assert sorted({a.engine for a in pinned}) == [0, 1]
    run = simulate(SYSTEMS["sem_moe"], TESTBED, FlatCosts(), STICKY, pinned, 0, slot_LE)
    assert run.remote_share < 0.4
