"""All Prometheus metrics of a server, read at each scrape. A metric with the meaning of one of vLLM's has its name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gimbal_jax.scheduler.trace import idle_trace
from gimbal_jax.serving.engine.status import EngineStatus, StepStatus
from gimbal_jax.serving.frontend.frontend import Frontend
from gimbal_jax.serving.monitoring.families import (
    by_engine,
    counters,
    engine_counters,
    engine_gauges,
    gauges,
    histogram,
)
from gimbal_jax.serving.monitoring.placement_metrics import loop_metrics, traffic_metrics
from gimbal_jax.serving.monitoring.request_metrics import ENDS, RequestHistograms
from gimbal_jax.version import __version__

STATES = ("warming", "serving", "draining", "stopped", "failed")
ENGINE_GAUGES = (
    ("free_pages", "KV pages that no request holds.", "free_pages"),
    ("cached_pages", "KV pages that hold a known prefix, in use or not.", "cached_pages"),
)
"""(metric, description, field of ``EngineStatus``)."""
ENGINE_COUNTERS = (
    ("num_preemptions", "Requests that lost their row for lack of KV pages.", "preemptions"),
    ("computed_tokens", "Tokens that went through the model.", "tokens_computed"),
    ("prefill_tokens_computed", "Prefill tokens that went through the model.", "prefill_tokens"),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries"),
    ("prefix_cache_hits", "Prompt tokens that the prefix cache held.", "prefix_hits"),
)
"""(metric, description, field of ``EngineStatus``)."""


def metrics_registry(frontend: Frontend, histograms: RequestHistograms) -> CollectorRegistry:
    """Return a registry of everything that a scrape shows, including the memory and file handles of the process."""
    registry = CollectorRegistry()
    registry.register(ServerCollector(frontend, histograms))
    ProcessCollector(registry=registry)
    return registry


class ServerCollector(Collector):
    """Metrics of one server. It works in every state of the server and from any thread."""

    def __init__(self, frontend: Frontend, histograms: RequestHistograms) -> None:
        self._frontend = frontend
        self._core = frontend.core
        self._histograms = histograms
        self._start = frontend.clock()

    def describe(self) -> list[Metric]:
        return []  # registration must not scrape a core that is still warming up

    def collect(self) -> Iterator[Metric]:
        status, now = self._core.status(), self._frontend.clock()
        yield InfoMetricFamily("gimbal_build", "Version of the server.", {"version": __version__})
        yield gauges(
            "gimbal_state",
            "State of the server; 1 for the current one.",
            "state",
            {state: float(status.state == state) for state in STATES},
        )
        yield from self._requests()
        yield from self._histograms.collect()
        yield from self._traces(now)
        yield from self._engines(status.engines)
        yield from self._steps(status.steps)
        yield from self._dispatch()
        yield from traffic_metrics(self._core.model, self._core.config.mesh, status.placement)
        yield from loop_metrics(status.placement, now, self._start)

    def _requests(self) -> Iterator[Metric]:
        count = self._frontend.counters
        outcomes = dict.fromkeys(ENDS, 0) | dict(count.outcomes)
        refused = outcomes.pop("refused", 0)
        yield GaugeMetricFamily("gimbal_active_requests", "Requests that are streaming.", self._frontend.active)
        yield counters(
            "gimbal_request_success", "Ended requests by finish reason. All engines.", "finished_reason", outcomes
        )
        yield CounterMetricFamily("gimbal_requests_refused", "Requests rejected, mostly by a full queue.", refused)
        yield CounterMetricFamily("gimbal_prompt_tokens", "Prompt tokens accepted.", count.prompt_tokens)
        yield CounterMetricFamily("gimbal_generation_tokens", "Output tokens sent to clients.", count.generated_tokens)

    def _traces(self, now: float) -> Iterator[Metric]:
        """Yield what dispatch sees. An engine without a trace counts as idle, with an infinitely old trace."""
        published = {trace.engine: trace for trace in self._core.traces}
        engines = range(self._core.config.mesh.dp)
        traces = [published.get(engine) or idle_trace(engine, -math.inf) for engine in engines]
        ages_S = [now - trace.time for trace in traces]
        yield from engine_gauges(
            "num_requests_running", "Requests that have a row in the step.", [t.running_requests for t in traces]
        )
        central = self._core.central_queue
        waiting_S = [t.waiting_requests for t in traces]
        yield from engine_gauges(
            "num_requests_waiting", "Requests that wait in a queue.", waiting_S, sum(waiting_S) + central
        )
        yield GaugeMetricFamily("gimbal_central_queue_requests", "Requests that have no engine yet.", central)
        yield from engine_gauges(
            "prefill_tokens",
            "Prefill tokens left to compute, of running and waiting requests.",
            [t.running_prefill_tokens + t.waiting_prefill_tokens for t in traces],
        )
        yield from engine_gauges(
            "kv_tokens", "Tokens of running requests in the KV cache.", [t.kv_tokens for t in traces]
        )
        yield from engine_gauges(
            "waiting_tokens", "Tokens of the waiting requests.", [t.waiting_tokens for t in traces]
        )
        yield from engine_gauges(
            "expert_pressure",
            "Expert tokens per step on the engine's ranks, in token equivalents.",
            [t.expert_pressure for t in traces],
        )
        yield from engine_gauges(
            "trace_age_seconds",
            "Seconds since the latest trace; infinite before the first. The aggregate is the oldest.",
            ages_S,
            max(ages_S),
        )

    def _engines(self, engines: Sequence[EngineStatus]) -> Iterator[Metric]:
        pages = self._core.config.engine.num_pages
        used_S = [1 - engine.free_pages / pages for engine in engines]
        mean = sum(used_S) / len(used_S)
        yield from engine_gauges("kv_cache_usage_perc", "Share of KV pages in use; 1 is all.", used_S, mean)
        for name, text, field in ENGINE_GAUGES:
            yield from engine_gauges(name, text, [getattr(engine, field) for engine in engines])
        for name, text, field in ENGINE_COUNTERS:
            yield from engine_counters(name, text, [getattr(engine, field) for engine in engines])

    def _steps(self, steps: StepStatus) -> Iterator[Metric]:
        yield CounterMetricFamily("gimbal_steps", "Steps since start.", steps.count)
        yield histogram("gimbal_step_seconds", "Seconds of a step on the devices.", steps.seconds)
        yield histogram("gimbal_step_tokens", "Tokens of a step, over all engines.", steps.tokens)
        phases = GaugeMetricFamily(
            "gimbal_tick_phase_seconds",
            "Seconds of each part of a tick: mean, p50 and p99 of the last ticks that had a step.",
            labels=["phase", "statistic"],
        )
        for phase in steps.phases:
            for statistic, value in (("mean", phase.mean_s), ("p50", phase.p50_s), ("p99", phase.p99_s)):
                phases.add_metric([phase.name, statistic], value)
        yield phases
        yield CounterMetricFamily(
            "gimbal_compiles_after_warmup",
            "Programs compiled while serving; more than 0 is a bug.",
            steps.compiles_after_warmup,
        )

    def _dispatch(self) -> Iterator[Metric]:
        dispatcher = self._frontend.dispatcher
        yield counters("gimbal_dispatches", "Dispatch decisions by rule.", "rule", dict(self._frontend.counters.rules))
        yield from engine_gauges(
            "dispatch_compensation_tokens",
            "Prefill tokens sent to the engine that its latest trace does not include.",
            dispatcher.compensation_S,
        )
        scores = GaugeMetricFamily(
            "gimbal_engine_dispatch_score",
            "Summands of the engines' scores in the last dispatch decision; none if its rule compares no scores.",
            labels=["engine", "term"],
        )
        for term, values_S in (dispatcher.recent[-1].decision.terms if dispatcher.recent else {}).items():
            for engine, value in by_engine(values_S).items():
                scores.add_metric([engine, term], value)
        yield scores
