"""A whole run under virtual time: arrivals are dispatched, engines tick, and clients are measured.

EngineCore, dispatcher, queues, traffic and placement are the server's code. Devices, clock and clients are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from gimbal_jax.bench.measurement import Measurement, Summary, summarise
from gimbal_jax.config import EngineConfig, MeshConfig, ModelConfig, ServerConfig
from gimbal_jax.exceptions import QueueFull
from gimbal_jax.model.sizes import expert_bytes
from gimbal_jax.scheduler.dispatcher import Dispatcher, Ticket
from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.serving.core.admission import admit
from gimbal_jax.serving.core.core import EngineCore, TickNews
from gimbal_jax.serving.engine.limits import max_sequence_tokens
from gimbal_jax.serving.engine.request import Request, SamplingParams
from gimbal_jax.serving.placement.rebalance import Rebalancer
from gimbal_jax.serving.placement.records import PlacementRecord
from gimbal_jax.simulation.clock import VirtualClock, VirtualExecutor
from gimbal_jax.simulation.routing import Router
from gimbal_jax.simulation.runner import SimulatedRunner
from gimbal_jax.simulation.systems import System
from gimbal_jax.simulation.work import Costs
from gimbal_jax.simulation.workload import Arrival

GAP_PERIOD_S = 10.0
"""Seconds of the periods over which engines' prompt throughput is compared, as in vLLM's log."""


@dataclass(frozen=True)
class Testbed:
    """Model, mesh and engine limits that the compared systems run on."""

    model: ModelConfig
    mesh: MeshConfig
    engine: EngineConfig


@dataclass(frozen=True, eq=False)
class Run:
    """Results of a run. Means over time are weighted by time, from time 0 to the last token."""

    requests: tuple[Measurement, ...]
    """Measurements in the order of arrival."""
    clients: Summary
    seconds: float
    """Seconds from time 0 to the last token."""
    steps: int
    parts: Mapping[str, float]
    """Seconds that passed in steps, by part, and in migrations."""
    live: float
    """Mean number of requests that have arrived and have not ended."""
    running: float
    """Mean number of running requests per engine. The other ``live`` requests wait."""
    kv_use: float
    """Mean share of KV pages in use."""
    prompt_gap: float
    """Mean difference between the engines with the most and the least prompt tokens per second (``GAP_PERIOD_S``)."""
    imbalance: float
    """Fullest over mean rank load, step by step and layer by layer, weighted by tokens."""
    remote_share: float
    """Share of expert tokens that left their source's ranks."""
    far_share: float
    """Share of expert tokens that left their source's node."""
    far_bytes: float
    """Bytes that the exchange sent between nodes, without moves of experts."""
    placements: tuple[PlacementRecord, ...]
    experts_moved: int
    bytes_moved: int
    preemptions: int
    tokens_computed: int
    """Tokens that went through the model, recomputed ones included."""
    counts_LSE: np.ndarray
    slot_of_expert_LE: np.ndarray
    """Placement at the end."""
    outside: Mapping[str, int]
    """Number of extrapolated prices, by operation (``Costs.outside``)."""


def simulate(
    system: System,
    testbed: Testbed,
    costs: Costs,
    router: Router,
    arrivals: Sequence[Arrival],
    seed: int,
    slot_of_expert_LE: np.ndarray | None = None,
    on_done: Callable[[Measurement], None] = lambda measurement: None,
) -> Run:
    """Serve all arrivals, which are sorted by time, and return the run. Equal arguments give equal runs.

    ``slot_of_expert_LE`` is the placement at the start; None for the contiguous one. ``on_done`` gets the measurement
    of each request when it ends. Raises ValueError if a request is longer than the engine's limits allow.
    """
    return _Simulation(system, testbed, costs, router, seed, slot_of_expert_LE, on_done).run(arrivals)


@dataclass(slots=True)
class _Live:
    """Observations of the client of a request that has not ended."""

    arrival_s: float
    input_tokens: int
    ticket: Ticket | None = None
    """The dispatcher's ticket; None if the queue was full."""
    output_tokens: int = 0
    ttft_s: float = math.nan

    def ended(self, now: float, error: str) -> Measurement:
        return Measurement(
            self.arrival_s, self.input_tokens, self.output_tokens, self.ttft_s, now - self.arrival_s, error
        )


class _Simulation:
    """One run while it goes on."""

    def __init__(
        self,
        system: System,
        testbed: Testbed,
        costs: Costs,
        router: Router,
        seed: int,
        slot_of_expert_LE: np.ndarray | None,
        on_done: Callable[[Measurement], None],
    ) -> None:
        model, mesh, placement = testbed.model, testbed.mesh, system.placement
        # Blocking systems move all experts in one tick, so the bytes per tick are unlimited.
        blocking = system.migration == "blocking"
        if blocking:
            placement = replace(placement, migrate_bytes_per_tick=2**63)
        if slot_of_expert_LE is None:
            slot_of_expert_LE = static_placement(router.layers, router.experts, mesh.ranks)
        rng = np.random.default_rng(seed)
        config = ServerConfig(mesh, testbed.engine, system.dispatch, system.queue, placement)
        clock = VirtualClock()
        decisions = VirtualExecutor(clock, costs.decision_seconds(placement.policy), blocking)
        self._runner = SimulatedRunner(
            config,
            slot_of_expert_LE,
            router,
            costs,
            clock,
            rng,
            expert_bytes(model),
            overlapped=system.migration == "overlapped",
            on_time=self._observe,
        )
        rebalancer = Rebalancer(model, config, self._runner, decisions)
        self._server = EngineCore(model, config, self._runner, rebalancer, lambda: clock.now)
        self._server.subscribe(self._deliver)
        self._dispatcher = Dispatcher(mesh.dp, system.dispatch, testbed.engine.token_budget, draw=rng.random)
        self._first_window_steps = system.first_window_steps
        self._clock, self._config, self._costs, self._router, self._on_done = clock, config, costs, router, on_done
        self._live: dict[str, _Live] = {}
        self._done: dict[str, Measurement] = {}
        # Integrals over virtual time, from which the report computes means.
        self._live_integral = self._changed = 0.0
        self._running_integral = self._kv_integral = 0.0
        self._prompt_tokens_S = np.zeros(mesh.dp, np.int64)
        self._gaps: list[float] = []

    def run(self, arrivals: Sequence[Arrival]) -> Run:
        clock, period = self._clock, self._config.dispatch.trace_period_s
        self._check(arrivals)
        for number, arrival in enumerate(arrivals):
            clock.at(arrival.time_s, partial(self._arrive, number, arrival))
        clock.at(GAP_PERIOD_S, self._sample_gap)
        self._server.open()
        # Some systems decide for the first time before the first window of steps has ended.
        asked = self._first_window_steps is None
        while len(self._done) < len(arrivals):
            began = clock.now
            self._server.tick(began)
            if not asked and self._runner.steps >= (self._first_window_steps or 0):
                self._server.rebalance()
                asked = True
            if clock.now == began:  # no work: wait for the next event, at most as long as the real server sleeps
                clock.advance(min(period, clock.next_due - began))
        return self._report(len(arrivals))

    def _check(self, arrivals: Sequence[Arrival]) -> None:
        limit = max_sequence_tokens(self._config.engine)
        for arrival in arrivals:
            if arrival.input_tokens + arrival.output_tokens > limit:
                raise ValueError(
                    f"input_tokens + output_tokens must be at most {limit} (max_model_len, num_pages), not "
                    f"{arrival.input_tokens} + {arrival.output_tokens}"
                )

    def _arrive(self, number: int, arrival: Arrival) -> None:
        """Admit a request as the frontend does. A full queue ends it."""
        request = Request(
            id=str(number),
            label=str(number),
            prompt=(self._router.prompt_token(arrival.topic),) * arrival.input_tokens,
            sampling=SamplingParams(arrival.output_tokens, temperature=0.0),
            arrival=self._clock.now,
            engine=arrival.engine,
        )
        self._count_live(request.arrival)
        live = self._live[request.id] = _Live(arrival.time_s, arrival.input_tokens)
        try:
            live.ticket = admit(self._server, self._dispatcher, request)
        except QueueFull as error:
            self._finish(request.id, str(error))

    def _deliver(self, news: TickNews) -> None:
        """Process the news of a tick, at the end of its step."""
        now = self._clock.now
        for output in news.outputs:
            seen = self._live[output.request_id]
            if seen.output_tokens == 0:
                seen.ttft_s = now - seen.arrival_s
            seen.output_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                self._finish(output.request_id, output.error)

    def _finish(self, request_id: str, error: str) -> None:
        self._count_live(self._clock.now)
        live = self._live.pop(request_id)
        if live.ticket is not None:
            live.ticket.release()
        measurement = live.ended(self._clock.now, error)
        self._done[request_id] = measurement
        self._on_done(measurement)

    def _count_live(self, now: float) -> None:
        """Add up live requests over time. Called before each change of their number."""
        self._live_integral += len(self._live) * (now - self._changed)
        self._changed = now

    def _observe(self, seconds: float) -> None:
        """Add up running requests and KV use over ``seconds`` of a step or a round of moves, before its results."""
        for engine in self._server.engines:
            self._running_integral += seconds * engine.running
            self._kv_integral += seconds * (1 - engine.free_pages / self._config.engine.num_pages)

    def _sample_gap(self) -> None:
        """Record the gap between engines in prompt tokens since the last sample, and schedule the next sample."""
        tokens_S = np.array([engine.prefill_tokens for engine in self._server.engines])
        since_S, self._prompt_tokens_S = tokens_S - self._prompt_tokens_S, tokens_S
        self._gaps.append(float(since_S.max() - since_S.min()) / GAP_PERIOD_S)
        self._clock.at(self._clock.now + GAP_PERIOD_S, self._sample_gap)

    def _report(self, count: int) -> Run:
        requests = tuple(self._done[str(number)] for number in range(count))
        seconds = max((m.arrival_s + m.e2e_s for m in requests), default=0.0)
        status = self._server.status()
        self._server.stop()
        engines, runner = len(self._server.engines), self._runner
        running = self._running_integral / max(seconds, 1e-9)
        return Run(
            requests=requests,
            clients=summarise(requests),
            seconds=seconds,
            steps=runner.steps,
            parts=dict(runner.seconds),
            live=self._live_integral / max(seconds, 1e-9),
            running=running / engines,
            kv_use=self._kv_integral / max(seconds, 1e-9) / engines,
            prompt_gap=float(np.mean(self._gaps)) if self._gaps else math.nan,
            imbalance=runner.fullest_pairs * self._config.mesh.ranks / max(runner.pairs, 1),
            remote_share=runner.remote_pairs / max(runner.pairs, 1),
            far_share=runner.far_pairs / max(runner.pairs, 1),
            far_bytes=runner.far_bytes,
            placements=status.placement.records,
            experts_moved=status.placement.totals.experts_moved,
            bytes_moved=status.placement.totals.bytes_moved,
            preemptions=status.preemptions,
            tokens_computed=sum(engine.tokens_computed for engine in status.engines),
            counts_LSE=status.placement.total_counts_LSE,
            slot_of_expert_LE=status.placement.slot_of_expert_LE,
            outside=dict(self._costs.outside),
        )
