"""Whole runs: conserved totals, equal runs for equal seeds, and the effects of the real policies."""

import math
from dataclasses import replace

import numpy as np
import pytest

from gimbal_jax.config import DispatchConfig
from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.simulation.simulate import GAP_PERIOD_S, simulate
from gimbal_jax.simulation.workload import Arrival
from tests.simulation.rig import ENGINE, EXPERTS, LAYERS, ROUTER, TESTBED, FlatCosts, K, arrivals, system

SYSTEMS = {
    "gimbal": system(),
    "late": system(dispatch="late", placement="gimbal_refined"),
    "vllm": system("vllm_classic", "fcfs", "eplb", migration="blocking", first_window_steps=30),
    "static": system(placement="static"),
    "overlapped": system("vllm_0_33", "fcfs", "eplb", migration="overlapped"),
}


def run(name="gimbal", requests=None, costs=None, seed=0, testbed=TESTBED, **more):
    return simulate(SYSTEMS[name], testbed, costs or FlatCosts(), ROUTER, requests or arrivals(), seed=seed, **more)


@pytest.mark.parametrize("name", SYSTEMS)
def test_work_is_conserved(name):
    requests = arrivals()
    done = run(name, requests)
    assert [m.output_tokens for m in done.requests] == [a.output_tokens for a in requests]
    assert not done.clients.failed and done.preemptions == 0
    # All tokens but the last one of each output go through the model, each k times a layer.
    assert done.tokens_computed == sum(a.input_tokens + a.output_tokens - 1 for a in requests)
    assert (done.counts_LSE.sum(axis=(1, 2)) == K * done.tokens_computed).all()


@pytest.mark.parametrize(("nodes", "name"), [(1, "static"), (2, "static"), (2, "gimbal"), (2, "late")])
def test_pairs_that_leave_a_node_agree_with_the_counts(nodes, name):
    testbed = replace(TESTBED, mesh=replace(TESTBED.mesh, nodes=nodes))
    costs = FlatCosts()
    done = run(name, costs=costs, testbed=testbed)
    assert 0 <= done.far_share <= done.remote_share
    assert done.far_bytes == (pytest.approx(sum(map(costs.far_bytes, costs.steps))) if nodes > 1 else 0.0)
    if name == "static":  # engine s is a node of its own, and holds experts 8 s to 8 s + 7
        own = sum(int(done.counts_LSE[:, s, 8 * s : 8 * s + 8].sum()) for s in range(2))
        assert done.far_share == (0.0 if nodes == 1 else pytest.approx(1 - own / done.counts_LSE.sum()))
        assert done.remote_share == pytest.approx(1 - own / done.counts_LSE.sum())


@pytest.mark.parametrize("name", SYSTEMS)
def test_little_s_law(name):
    """Mean number of live requests = arrival rate * mean time in the system."""
    done = run(name)
    rate, stay = len(done.requests) / done.seconds, done.clients.e2e_mean_s
    assert done.live == pytest.approx(rate * stay, rel=1e-9)
    # What runs is in the system; steps are short against a stay.
    assert 0.5 * done.live < done.running * 2 <= done.live


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_engines_never_wait_while_there_is_work(name):
    """Busy from the first arrival to the last token: time is steps, migrations and blocking decisions."""
    requests = [replace(arrival, time_s=0.0) for arrival in arrivals()]
    costs = FlatCosts()
    done = run(name, requests, costs)
    decisions = costs.decision_s * len(done.placements) if SYSTEMS[name].migration == "blocking" else 0.0
    assert done.seconds == pytest.approx(sum(done.parts.values()) + decisions, abs=2 * costs.step_s)


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_same_seed_gives_the_same_run(name):
    first, again, other = run(name), run(name), run(name, seed=1)
    assert first.requests == again.requests and first.parts == again.parts
    assert (first.slot_of_expert_LE == again.slot_of_expert_LE).all()
    assert (first.counts_LSE == again.counts_LSE).all()
    assert (first.counts_LSE != other.counts_LSE).any()


def test_times_are_sums_of_step_costs():
    """A single request: its prompt takes two steps, and each token after it one step."""
    costs = FlatCosts(pair_s=0.0)
    (measured,) = run(requests=[Arrival(1.0, 100, 5)], costs=costs).requests  # 100 tokens in steps of 64
    assert measured.ttft_s == pytest.approx(2 * costs.step_s)
    assert measured.tpot_s == pytest.approx(costs.step_s)
    assert measured.e2e_s == pytest.approx(6 * costs.step_s)


def test_the_slowest_rank_sets_the_pace():
    frozen = system(placement="static")
    load_LE = run().counts_LSE.sum(axis=1)
    hottest_first_LE = np.argsort(np.argsort(-load_LE, axis=1), axis=1).astype(np.int32)
    contiguous, crowded = (
        simulate(frozen, TESTBED, FlatCosts(), ROUTER, arrivals(30), 0, slot_of_expert_LE=placement)
        for placement in (static_placement(LAYERS, EXPERTS, 4), hottest_first_LE)
    )
    assert (crowded.slot_of_expert_LE == hottest_first_LE).all()
    slower = crowded.parts["experts"] / contiguous.parts["experts"]
    assert slower > 1.15
    assert crowded.imbalance / contiguous.imbalance == pytest.approx(slower, rel=0.02)


def test_requests_that_arrive_during_a_step_are_dispatched_then():
    """Two engines, two requests 1 ms apart: the second one arrives while the first one's step runs."""
    costs = FlatCosts(pair_s=0.0)
    first, second = run(requests=[Arrival(0.0, 10, 3), Arrival(0.001, 10, 3)], costs=costs).requests
    assert first.ttft_s == pytest.approx(costs.step_s)
    assert second.ttft_s == pytest.approx(2 * costs.step_s - 0.001)


def test_placement_follows_the_traffic_and_takes_migration_time():
    costs = FlatCosts()
    moved = run(costs=costs, requests=arrivals(300))
    assert moved.experts_moved > 0 and moved.parts["migration"] > 0
    assert run("overlapped").parts["migration"] == 0
    static = simulate(system(placement="static"), TESTBED, FlatCosts(), ROUTER, arrivals(300), 0)
    assert static.experts_moved == 0 and "migration" not in static.parts
    assert moved.imbalance < static.imbalance


def test_a_first_window_may_be_shorter():
    done = run("vllm")
    steps = [record.step for record in done.placements]
    assert 30 <= steps[0] <= 33 and 80 <= steps[1] <= 86


def test_pinned_requests_go_to_their_engine():
    pinned = [replace(arrival, engine=1) for arrival in arrivals(40)]
    done = run(requests=pinned)
    assert done.counts_LSE[:, 0].sum() == 0


def test_requests_beyond_a_full_queue_fail_and_the_others_continue():
    full = replace(TESTBED, engine=replace(ENGINE, max_queue=5))
    requests = [replace(arrival, time_s=0.0) for arrival in arrivals(40)]
    done = run(requests=requests, testbed=full)
    assert 0 < done.clients.failed < 40
    refused = [m for m in done.requests if m.error]
    assert all("max_queue" in m.error and math.isnan(m.ttft_s) for m in refused)


def test_a_request_too_long_for_every_engine_is_rejected_before_the_run():
    with pytest.raises(ValueError, match=r"input_tokens \+ output_tokens must be at most 400 .* not 390 \+ 11"):
        run(requests=[Arrival(0.0, 390, 11)])


def test_the_prompt_gap_is_the_difference_between_engines():
    costs = FlatCosts(pair_s=0.0)
    requests = [Arrival(float(t), 50, 1, engine=0) for t in range(int(2 * GAP_PERIOD_S) + 1)]
    done = run(requests=requests, costs=costs)
    assert done.prompt_gap == pytest.approx(50, rel=0.06)  # one prompt a second on one engine, none on the other


def test_few_pages_preempt_and_still_conserve():
    tight = replace(TESTBED, engine=replace(ENGINE, num_pages=50))
    requests = [replace(arrival, time_s=0.0) for arrival in arrivals(40)]
    done = run(requests=requests, testbed=tight)
    assert done.preemptions > 0 and not done.clients.failed
    assert done.tokens_computed > sum(a.input_tokens + a.output_tokens - 1 for a in requests)
    assert (done.counts_LSE.sum(axis=(1, 2)) == K * done.tokens_computed).all()


def test_dispatch_settings_reach_the_dispatcher():
    calm = replace(SYSTEMS["gimbal"], dispatch=DispatchConfig(policy="gimbal", close_scores=1e9))
    done = simulate(calm, TESTBED, FlatCosts(), ROUTER, arrivals(80), 0)
    turns = simulate(
        replace(calm, dispatch=DispatchConfig(policy="round_robin")), TESTBED, FlatCosts(), ROUTER, arrivals(80), 0
    )
    assert (done.counts_LSE.sum(axis=(0, 2)) == turns.counts_LSE.sum(axis=(0, 2))).all()
