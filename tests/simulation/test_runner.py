"""The simulated devices: they route, count and move as the real ones do, and charge for it."""

import numpy as np
import pytest

from gimbal_jax.config import ServerConfig
from gimbal_jax.scheduler.migration import Round, plan_rounds
from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.scheduler.traffic import imbalance_L, remote_share
from gimbal_jax.serving.plan import Chunk, Plan
from gimbal_jax.serving.request import SamplingParams
from gimbal_jax.simulation.clock import VirtualClock
from gimbal_jax.simulation.runner import SimulatedRunner
from tests.simulation.rig import ENGINE, EXPERTS, LAYERS, ROUTER, TESTBED, FlatCosts, K

GREEDY = SamplingParams(max_tokens=10, temperature=0.0)


def runner(costs=None, **more):
    config = ServerConfig(mesh=TESTBED.mesh, engine=ENGINE)
    slots = static_placement(LAYERS, EXPERTS, TESTBED.mesh.ranks)
    clock = VirtualClock()
    rng = np.random.default_rng(0)
    return SimulatedRunner(config, slots, ROUTER, costs or FlatCosts(), clock, rng, 100, **more), clock


def chunk(topic, tokens, start=0, choose=True, output=False):
    token = ROUTER.prompt_token(topic)
    ids = np.full(tokens, ROUTER.output_token(token) if output else token, np.int32)
    return Chunk("r", ids, start, np.zeros(50, np.int32), GREEDY if choose else None)


PLANS = [
    Plan((chunk(0, 1, 7, output=True), chunk(2, 1, 30, output=True)), (chunk(1, 70), chunk(0, 5, choose=False)), 10),
    Plan((chunk(1, 1, 3, output=True),)),
]


def test_the_cost_model_sees_the_work():
    costs = FlatCosts()
    simulated, clock = runner(costs)
    simulated.step(PLANS)
    (work,) = costs.steps
    first, second = work.engines_S
    assert first.decode_contexts.tolist() == [8, 31] and second.decode_contexts.tolist() == [4]
    assert first.prefill == ((0, 70), (0, 5)) and second.prefill == ()
    assert (first.chosen, second.chosen) == (3, 1)
    assert (first.tokens, second.tokens) == (77, 1)
    assert (work.pairs_LSP.sum(axis=2) == [[77 * K, 1 * K]] * LAYERS).all()
    assert clock.now == sum(costs.step_parts(work).values()) == pytest.approx(sum(simulated.seconds.values()))


def test_an_output_token_follows_where_one_is_to_be_chosen():
    chosen = runner()[0].step(PLANS)
    outputs = [[None if token is None else token.token_id for token in tokens] for tokens in chosen]
    wanted = [ROUTER.output_token(ROUTER.prompt_token(topic)) for topic in (0, 2, 1)]
    assert outputs == [[*wanted, None], [wanted[2]]]


def test_counts_are_by_expert_whatever_the_placement_and_taken_once():
    simulated, _ = runner()
    simulated.step(PLANS)
    counts_LSE = simulated.take_counts()
    assert (counts_LSE.sum(axis=2) == [[77 * K, K]] * LAYERS).all()
    assert not simulated.take_counts().any()


def test_rank_loads_follow_the_placement():
    """Sums over steps agree with traffic's own functions of the counts, before and after experts moved."""
    costs = FlatCosts()
    simulated, _ = runner(costs)
    new_slot_E = np.random.default_rng(1).permutation(EXPERTS).astype(np.int32)
    for layer in range(LAYERS):
        for moves in plan_rounds(simulated.slot_of_expert_LE[layer], new_slot_E, 4, 2):
            simulated.migrate(layer, moves)
    assert (simulated.slot_of_expert_LE == new_slot_E).all()
    simulated.step(PLANS)
    counts_LSE = simulated.take_counts()
    (work,) = costs.steps
    slots = simulated.slot_of_expert_LE
    mean_L = work.load_LR.mean(axis=1)
    assert work.load_LR.max(axis=1) / mean_L == pytest.approx(imbalance_L(counts_LSE, slots, 4))
    assert simulated.remote_pairs / simulated.pairs == pytest.approx(remote_share(counts_LSE, slots, 4))
    assert simulated.fullest_pairs == work.load_LR.max(axis=1).sum()
    assert (work.pairs_LSP[0] == counts_LSE[0][:, np.argsort(new_slot_E)]).all()
    assert work.active_LR.sum() == (counts_LSE.sum(axis=1) > 0).sum()


@pytest.mark.parametrize(("overlapped", "seconds"), [(False, 0.001), (True, 0.0)])
def test_a_round_is_charged(overlapped, seconds):
    simulated, clock = runner(overlapped=overlapped)
    swapped_E = simulated.slot_of_expert_LE[0].copy()
    swapped_E[[0, 15]] = swapped_E[[15, 0]]
    (moves,) = plan_rounds(simulated.slot_of_expert_LE[0], swapped_E, 4, 2)
    simulated.migrate(0, moves)
    assert clock.now == simulated.seconds["migration"] == seconds


def test_on_time_is_told_of_steps_and_rounds_when_their_time_has_passed():
    told: list[tuple[float, float]] = []
    clocks: list[VirtualClock] = []
    simulated, clock = runner(on_time=lambda seconds: told.append((seconds, clocks[0].now)))
    clocks.append(clock)
    simulated.step(PLANS)
    after_step = clock.now
    simulated.migrate(0, Round(np.zeros(0, np.int32), np.zeros(0, np.int32), simulated.slot_of_expert_LE[0]))
    assert told == [(after_step, after_step), (0.001, clock.now)]
