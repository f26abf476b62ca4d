"""The simulator gives clients the times that the frontend and the engine core give them, if steps take the same."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from gimbal_jax.bench.measurement import Measurement, summarise
from gimbal_jax.config import EngineConfig, MeshConfig, PlacementConfig, ServerConfig
from gimbal_jax.serving.core.core import EngineCore
from gimbal_jax.serving.engine.plan import StepResult
from gimbal_jax.serving.engine.request import SamplingParams
from gimbal_jax.serving.frontend.frontend import Frontend
from gimbal_jax.simulation import simulate
from gimbal_jax.simulation.routing import BALANCED, synthetic_router
from gimbal_jax.simulation.systems import System
from gimbal_jax.simulation.workload import Arrival
from research.measured_costs import MeasuredCosts
from research.timed_runner import TimedRunner
from tests.bench.test_replay import VirtualTimeLoop
from tests.e2e.rig import EXPERTS, LAYERS, MODEL, TOP_K

CONFIG = ServerConfig(
    MeshConfig(dp=2),
    EngineConfig(max_model_len=128, num_pages=200, max_rows=16, token_budget=128, tile=16),
    placement=PlacementConfig("static"),
)
IDLE_S = 0.001
"""Time between two ticks without work."""


class SteadyRunner:
    """Devices whose steps take 30 ms, and 0.2 ms for each prefill token, of the loop's virtual time."""

    expert_bytes, ahead = 1, 0
    slot_of_expert_LE = np.tile(np.arange(EXPERTS, dtype=np.int32), (LAYERS, 1))
    buckets = ((16, 8),)

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._selector = loop.selector

    def enqueue(self, plans, mark):
        mark("batch")

        def pending():
            self._selector.now += 0.030 + 0.0002 * sum(len(chunk.tokens) for plan in plans for chunk in plan.prefill)
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


async def serve_all(server: EngineCore, arrivals: list[Arrival], loop: VirtualTimeLoop) -> list[Measurement]:
    """Send every request when it is due, tick the server by hand, and return what each client measured."""
    frontend = Frontend(server, loop.time)
    rng = np.random.default_rng(1)

    async def send(number: int, arrival: Arrival) -> Measurement:
        await asyncio.sleep(arrival.time_s - loop.time())
        sent, first, tokens = loop.time(), float("nan"), 0
        prompt = tuple(rng.integers(MODEL.vocab_size, size=arrival.input_tokens).tolist())
        sampling = SamplingParams(arrival.output_tokens, temperature=0.0)
        with frontend.generate(str(number), prompt, sampling) as stream:
            async for delta in stream:
                if delta.token_ids and not tokens:
                    first = loop.time()
                tokens += len(delta.token_ids)
        return Measurement(sent, len(prompt), tokens, first - sent, loop.time() - sent)

    clients = [asyncio.create_task(send(*numbered)) for numbered in enumerate(arrivals)]
    while not all(client.done() for client in clients):
        began = loop.time()
        server.tick(began)
        if loop.time() == began:
            await asyncio.sleep(IDLE_S)
        # Clients receive the tokens of this step, and requests that became due during it are sent.
        for _ in range(5):
            await asyncio.sleep(0)
    frontend.close()
    return [client.result() for client in clients]


def test_clients_measure_the_same_times_with_the_same_steps():
    """Queues build up: rows are full for much of the time."""
    rng, requests = np.random.default_rng(0), 300
    times_s = np.sort(rng.uniform(0, 4.0, requests)).tolist()
    lengths = rng.integers(1, (80, 40), size=(requests, 2), endpoint=True).tolist()
    arrivals = [Arrival(time_s, *pair) for time_s, pair in zip(times_s, lengths, strict=True)]

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as loops:
        loop = loops.get_loop()
        assert isinstance(loop, VirtualTimeLoop)
        timed = TimedRunner(SteadyRunner(loop), loop.time)
        server = EngineCore(MODEL, CONFIG, timed, clock=loop.time)
        server.open()
        seen = loops.run(serve_all(server, arrivals, loop))
        server.stop()

    costs = MeasuredCosts(timed.take_steps(), SteadyRunner.buckets, CONFIG.engine.tile)
    router = synthetic_router(BALANCED, LAYERS, EXPERTS, TOP_K, seed=0)
    system = System("as configured", "", CONFIG.dispatch, CONFIG.queue, CONFIG.placement)
    testbed = simulate.Testbed(MODEL, CONFIG.mesh, CONFIG.engine)
    sent = [replace(a, time_s=m.arrival_s) for a, m in zip(arrivals, seen, strict=True)]
    simulated = simulate.simulate(system, testbed, costs, router, sorted(sent, key=lambda a: a.time_s), seed=0).clients
    real = summarise(seen)
    for clients in real, simulated:
        assert (clients.requests, clients.failed) == (requests, 0)
        assert clients.output_tokens_per_s * clients.seconds == pytest.approx(sum(a.output_tokens for a in arrivals))
    assert real.ttft_mean_s > 0.2  # many waited
    assert simulated.ttft_mean_s == pytest.approx(real.ttft_mean_s, rel=0.05)
    assert simulated.tpot_mean_s == pytest.approx(real.tpot_mean_s, rel=0.05)
