"""Whole runs with and without dispatch by expert affinity, over two nodes and experts that stay."""

from dataclasses import replace

import numpy as np
import pytest

from gimbal_jax.config import DispatchConfig, MeshConfig
from gimbal_jax.simulation.routing import RoutingConfig, synthetic_router
from gimbal_jax.simulation.simulate import Run, simulate
from tests.simulation.rig import ENGINE, EXPERTS, LAYERS, TESTBED, FlatCosts, K, arrivals, system

TWO_NODES = replace(TESTBED, mesh=MeshConfig(dp=4, tp=1, nodes=2), engine=replace(ENGINE, token_budget=128))
STATIC = system(placement="static")


def run(seed: int, affinity: bool, topics: int = 3, **dispatch) -> Run:
    router = synthetic_router(RoutingConfig(topics=topics, topicality=1.5), LAYERS, EXPERTS, K, seed)
    requests = [replace(one, topic=(one.topic or 0) % topics) for one in arrivals(count=600, rate=60.0, seed=seed)]
    named = replace(STATIC, dispatch=DispatchConfig(affinity=affinity, **dispatch))
    return simulate(named, TWO_NODES, FlatCosts(), router, requests, seed)


@pytest.mark.parametrize("seed", range(2))
def test_topics_find_the_node_of_their_experts_and_no_engine_waits_for_it(seed):
    by_affinity, by_load = (run(seed, affinity) for affinity in (True, False))
    assert by_affinity.far_share < 0.95 * by_load.far_share
    assert by_affinity.clients.ttft_mean_s < 1.5 * by_load.clients.ttft_mean_s


def test_with_one_topic_it_decides_nothing():
    by_affinity, by_load = (run(0, affinity, topics=1) for affinity in (True, False))
    assert by_affinity.requests == by_load.requests
    assert np.array_equal(by_affinity.counts_LSE, by_load.counts_LSE)


def test_late_binding_takes_no_notice_of_it():
    assert run(0, True, policy="late").requests == run(0, False, policy="late").requests
