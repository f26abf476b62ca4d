"""Simulated devices: they route, count and move as the real ones do, and advance the clock by the costs."""

import numpy as np
import pytest

from gimbal_jax.config import MeshConfig, ServerConfig
from gimbal_jax.scheduler.migration import Round, plan_rounds
from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.scheduler.traffic import imbalance_L, remote_share
from gimbal_jax.serving.engine.plan import Chunk, DecodeRows, Plan, pack_sampling
from gimbal_jax.serving.engine.request import SamplingParams
from gimbal_jax.simulation.clock import VirtualClock
from gimbal_jax.simulation.runner import SimulatedRunner
from tests.simulation.rig import ENGINE, EXPERTS, LAYERS, ROUTER, TESTBED, FlatCosts, K

GREEDY = SamplingParams(max_tokens=10, temperature=0.0)


def runner(costs=None, mesh=TESTBED.mesh, slots=None, **more):
    config = ServerConfig(mesh=mesh, engine=ENGINE)
    if slots is None:
        slots = static_placement(LAYERS, EXPERTS, mesh.ranks)
    clock = VirtualClock()
    rng = np.random.default_rng(0)
    return SimulatedRunner(config, slots, ROUTER, costs or FlatCosts(), clock, rng, 100, **more), clock


def chunk(topic, tokens, choose=True):
    ids = np.full(tokens, ROUTER.prompt_token(topic), np.int32)
    return Chunk(9, ids, 0, np.zeros(50, np.int32), GREEDY if choose else None)


def decode(*rows):
    """Return (topic, position) of each row."""
    tokens = [ROUTER.output_token(ROUTER.prompt_token(topic)) for topic, _ in rows]
    starts = np.array([start for _, start in rows], np.int32)
    sampling_DX = np.tile(pack_sampling(GREEDY), (len(rows), 1))
    return DecodeRows(
        np.arange(len(rows), dtype=np.int32), np.array(tokens, np.int32), starts, np.zeros((len(rows), 50)), sampling_DX
    )


PLANS = [
    Plan(decode((0, 7), (2, 30)), (chunk(1, 70), chunk(0, 5, choose=False)), 10),
    Plan(decode((1, 3))),
]


def step(simulated):
    return simulated.enqueue(PLANS, lambda name: None)()


def test_the_cost_model_sees_the_work():
    costs = FlatCosts()
    simulated, clock = runner(costs)
    step(simulated)
    (work,) = costs.steps
    first, second = work.engines_S
    assert first.decode_contexts.tolist() == [8, 31] and second.decode_contexts.tolist() == [4]
    assert first.prefill == ((0, 70), (0, 5)) and second.prefill == ()
    assert (first.chosen, second.chosen) == (3, 1)
    assert (first.tokens, second.tokens) == (77, 1)
    assert (work.pairs_LSP.sum(axis=2) == [[77 * K, 1 * K]] * LAYERS).all()
    assert clock.now == sum(costs.step_parts(work).values()) == pytest.approx(sum(simulated.seconds.values()))


def test_a_step_returns_a_token_for_each_row_that_chooses_one():
    first, second = step(runner()[0])
    wanted = [ROUTER.output_token(ROUTER.prompt_token(topic)) for topic in (0, 2, 1)]
    assert [*first.token_D, first.token_C[0]] == wanted
    assert (second.token_D.tolist(), second.token_C.tolist()) == ([wanted[2]], [])


def test_time_passes_while_waiting_for_a_step():
    simulated, clock = runner()
    pending = simulated.enqueue(PLANS, lambda name: None)
    assert clock.now == 0.0
    pending()
    assert clock.now == sum(simulated.seconds.values()) > 0


def test_counts_are_by_expert_for_any_placement_and_taken_once():
    simulated, _ = runner()
    step(simulated)
    counts_LSE = simulated.begin_counts()()
    assert (counts_LSE.sum(axis=2) == [[77 * K, K]] * LAYERS).all()
    assert not simulated.begin_counts()().any()


def test_rank_loads_follow_the_placement():
    """Sums over steps agree with traffic's own functions of the counts, before and after experts moved."""
    costs = FlatCosts()
    simulated, _ = runner(costs)
    new_slot_E = np.random.default_rng(1).permutation(EXPERTS).astype(np.int32)
    for layer in range(LAYERS):
        for moves in plan_rounds(simulated.slot_of_expert_LE[layer], new_slot_E, 4, 2):
            simulated.migrate(layer, moves)
    assert (simulated.slot_of_expert_LE == new_slot_E).all()
    step(simulated)
    counts_LSE = simulated.begin_counts()()
    (work,) = costs.steps
    slots = simulated.slot_of_expert_LE
    mean_L = work.load_LR.mean(axis=1)
    assert work.load_LR.max(axis=1) / mean_L == pytest.approx(imbalance_L(counts_LSE, slots, 4))
    assert simulated.remote_pairs / simulated.pairs == pytest.approx(remote_share(counts_LSE, slots, 4))
    assert simulated.fullest_pairs == work.load_LR.max(axis=1).sum()
    assert (work.pairs_LSP[0] == counts_LSE[0][:, np.argsort(new_slot_E)]).all()
    assert work.active_LR.sum() == (counts_LSE.sum(axis=1) > 0).sum()


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_pairs_are_own_near_or_far(nodes):
    """A naive recount over sources and slots, after experts moved. Far bytes agree with the costs."""
    mesh = MeshConfig(4, 2, nodes)
    costs = FlatCosts()
    slots_LE = np.stack([np.random.default_rng(layer).permutation(EXPERTS) for layer in range(LAYERS)])
    simulated, _ = runner(costs, mesh, slots_LE)
    simulated.enqueue([*PLANS, Plan(decode()), Plan(decode((2, 5), (0, 1)))], lambda name: None)()
    counts_LSE = simulated.begin_counts()()
    found = {"own": 0, "near": 0, "far": 0}
    for (layer, source, expert), pairs in np.ndenumerate(counts_LSE):
        rank = slots_LE[layer, expert] * mesh.ranks // EXPERTS
        own, same_node = rank // mesh.tp == source, rank * nodes // 8 == source * nodes // 4
        found["own" if own else "near" if same_node else "far"] += int(pairs)
    assert simulated.far_pairs == found["far"]
    assert simulated.remote_pairs - simulated.far_pairs == found["near"]
    assert simulated.pairs == sum(found.values()) == counts_LSE.sum()
    (work,) = costs.steps
    assert simulated.far_bytes == (costs.far_bytes(work) if nodes > 1 else 0.0)
    assert (simulated.far_pairs > 0) == (nodes > 1)


@pytest.mark.parametrize(("overlapped", "seconds"), [(False, 0.001), (True, 0.0)])
def test_a_round_is_charged(overlapped, seconds):
    simulated, clock = runner(overlapped=overlapped)
    swapped_E = simulated.slot_of_expert_LE[0].copy()
    swapped_E[[0, 15]] = swapped_E[[15, 0]]
    (moves,) = plan_rounds(simulated.slot_of_expert_LE[0], swapped_E, 4, 2)
    simulated.migrate(0, moves)
    assert clock.now == simulated.seconds["migration"] == seconds


def test_on_time_is_called_for_steps_and_rounds_after_their_time():
    told: list[tuple[float, float]] = []
    clocks: list[VirtualClock] = []
    simulated, clock = runner(on_time=lambda seconds: told.append((seconds, clocks[0].now)))
    clocks.append(clock)
    step(simulated)
    after_step = clock.now
    simulated.migrate(0, Round(np.zeros(0, np.int32), np.zeros(0, np.int32), simulated.slot_of_expert_LE[0]))
    assert told == [(after_step, after_step), (0.001, clock.now)]
