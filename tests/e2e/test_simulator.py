"""The simulator against the real server, with the costs of the very steps that it ran: only its logic is tested."""

import time
from dataclasses import replace

import numpy as np
import pytest

from gimbal_jax.bench.measurement import Summary, summarise
from gimbal_jax.config import EngineConfig, MeshConfig, PlacementConfig, ServerConfig
from gimbal_jax.serving.core.core import EngineCore
from gimbal_jax.serving.engine.plan import StepResult
from gimbal_jax.simulation import simulate
from gimbal_jax.simulation.routing import BALANCED, synthetic_router
from gimbal_jax.simulation.systems import System
from gimbal_jax.simulation.workload import Arrival
from research.cpu_clients import Call, open_loop, running
from research.measured_costs import MeasuredCosts
from research.timed_runner import TimedRunner
from tests.e2e.rig import CONFIG, EXPERTS, LAYERS, MODEL, TOP_K


class SleepingRunner:
    """Devices whose steps take 30 ms, and 0.2 ms for each prefill token, however busy the CPU is."""

    expert_bytes, ahead = 1, 0
    slot_of_expert_LE = np.tile(np.arange(EXPERTS, dtype=np.int32), (LAYERS, 1))
    buckets = ((16, 8),)

    def enqueue(self, plans, mark):
        mark("batch")

        def pending():
            time.sleep(0.030 + 0.0002 * sum(len(chunk.tokens) for plan in plans for chunk in plan.prefill))
            return [
                StepResult(np.zeros(len(plan.decode), np.int32), np.zeros(len(plan.prefill), np.int32), {}, {})
                for plan in plans
            ]

        return pending

    def begin_counts(self):
        return lambda: np.zeros((LAYERS, 2, EXPERTS), np.int64)

    def migrate(self, layer, moves):
        raise AssertionError("experts stay")

    def compiles_after_warmup(self):
        return 0


SLEEPING = ServerConfig(
    MeshConfig(dp=2),
    EngineConfig(max_model_len=128, num_pages=200, max_rows=16, token_budget=128, tile=16),
    placement=PlacementConfig("static"),
)


def both(runner, config: ServerConfig, requests: int, longest_prompt: int, longest_output: int, seconds: float):
    """What clients of the real server and of the simulated one see of the same requests."""
    rng = np.random.default_rng(0)
    times_s = np.sort(rng.uniform(0, seconds, requests)).tolist()
    lengths = rng.integers(1, (longest_prompt, longest_output), size=(requests, 2), endpoint=True).tolist()
    arrivals = [Arrival(time_s, *pair) for time_s, pair in zip(times_s, lengths, strict=True)]
    calls = [
        Call(a.time_s, tuple(rng.integers(MODEL.vocab_size, size=a.input_tokens).tolist()), a.output_tokens)
        for a in arrivals
    ]
    timed = TimedRunner(runner, time.monotonic)
    with running(EngineCore(MODEL, config, timed)) as server:
        seen = open_loop(server, calls)
    costs = MeasuredCosts(timed.take_steps(), runner.buckets, config.engine.tile)
    router = synthetic_router(BALANCED, LAYERS, EXPERTS, TOP_K, seed=0)
    system = System("as configured", "", config.dispatch, config.queue, config.placement)
    testbed = simulate.Testbed(MODEL, config.mesh, config.engine)
    sent = sorted((replace(a, time_s=m.arrival_s) for a, m in zip(arrivals, seen, strict=True)), key=lambda a: a.time_s)
    simulated = simulate.simulate(system, testbed, costs, router, sent, seed=0).clients
    real = summarise(seen)
    for clients in real, simulated:
        assert (clients.requests, clients.failed) == (requests, 0)
        assert clients.output_tokens_per_s * clients.seconds == pytest.approx(sum(a.output_tokens for a in arrivals))
    return real, simulated


def ratios(real: Summary, simulated: Summary) -> tuple[float, float]:
    found = simulated.ttft_mean_s / real.ttft_mean_s, simulated.tpot_mean_s / real.tpot_mean_s
    print(f"simulated over real: TTFT {found[0]:.2f}, TPOT {found[1]:.2f}")
    return found


def test_clients_see_the_same_where_steps_take_the_same():
    """Queues build up: rows are full for much of the time."""
    real, simulated = both(SleepingRunner(), SLEEPING, requests=120, longest_prompt=80, longest_output=40, seconds=4.0)
    assert ratios(real, simulated) == pytest.approx((1, 1), rel=0.25)


def test_clients_of_real_devices_see_the_same_within_a_factor_of_two(runner):
    real, simulated = both(runner, CONFIG, requests=150, longest_prompt=40, longest_output=24, seconds=4.0)
    assert all(1 / 2 < ratio < 2 for ratio in ratios(real, simulated))
