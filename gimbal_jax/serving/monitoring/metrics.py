"""All Prometheus metrics of a server, read at each scrape. Where the meaning is vLLM's, so is the name."""

from __future__ import annotations

import math
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gimbal_jax.scheduler.trace import idle_trace
from gimbal_jax.serving.core.status import Status
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


def metrics_registry(frontend: Frontend, histograms: RequestHistograms) -> CollectorRegistry:
    """Everything that a scrape shows, the process' own memory and file handles included."""
    registry = CollectorRegistry()
    registry.register(ServerCollector(frontend, histograms))
    ProcessCollector(registry=registry)
    return registry


class ServerCollector(Collector):
    """Metrics of one server, in any state, from any thread."""

    def __init__(self, frontend: Frontend, histograms: RequestHistograms) -> None:
        self._frontend = frontend
        self._core = frontend.core
        self._histograms = histograms
        self._start = frontend.clock()

    def describe(self) -> list[Metric]:
        return []  # Registration must not scrape a core that is still warming up.

    def collect(self) -> Iterator[Metric]:
        status, now = self._core.status(), self._frontend.clock()
        yield InfoMetricFamily("gimbal_build", "Version of the server.", {"version": __version__})
        yield gauges(
            "gimbal_state",
            "1 for the state that the server is in.",
            "state",
            {state: float(status.state == state) for state in STATES},
        )
        yield from self._requests()
        yield from self._histograms.collect()
        yield from self._traces(now)
        yield from self._engines(status)
        yield from self._dispatch()
        yield from traffic_metrics(self._core.model, self._core.config.mesh, status)
        yield from loop_metrics(status, now, self._start)

    def _requests(self) -> Iterator[Metric]:
        count = self._frontend.counters
        outcomes = dict.fromkeys(ENDS, 0) | dict(count.outcomes)
        refused = outcomes.pop("refused", 0)
        yield GaugeMetricFamily("gimbal_active_requests", "Requests that are streaming now.", self._frontend.active)
        yield counters("gimbal_request_success", "Ended requests. All engines.", "finished_reason", outcomes)
        yield CounterMetricFamily("gimbal_requests_refused", "Requests refused, mostly by a full queue.", refused)
        yield CounterMetricFamily("gimbal_prompt_tokens", "Prompt tokens accepted.", count.prompt_tokens)
        yield CounterMetricFamily("gimbal_generation_tokens", "Tokens sent to clients.", count.generated_tokens)

    def _traces(self, now: float) -> Iterator[Metric]:
        """What dispatch sees. An engine that has published nothing yet is idle, and its trace infinitely old."""
        published = {trace.engine: trace for trace in self._core.traces}
        engines = range(self._core.config.mesh.dp)
        traces = [published.get(engine) or idle_trace(engine, -math.inf) for engine in engines]
        ages_S = [now - trace.time for trace in traces]
        yield from engine_gauges(
            "num_requests_running", "Requests with a row in the step.", [t.running_requests for t in traces]
        )
        central = self._core.central_queue
        waiting_S = [t.waiting_requests for t in traces]
        yield from engine_gauges("num_requests_waiting", "Requests in a queue.", waiting_S, sum(waiting_S) + central)
        yield GaugeMetricFamily("gimbal_central_queue_requests", "Requests that have no engine yet.", central)
        yield from engine_gauges(
            "prefill_tokens",
            "Prefill tokens still to do, of running and waiting requests.",
            [t.running_prefill_tokens + t.waiting_prefill_tokens for t in traces],
        )
        yield from engine_gauges(
            "kv_tokens", "Tokens of running requests in the KV cache.", [t.kv_tokens for t in traces]
        )
        yield from engine_gauges(
            "waiting_tokens", "Lengths of the waiting requests.", [t.waiting_tokens for t in traces]
        )
        yield from engine_gauges(
            "expert_pressure", "Expert tokens per step, in token equivalents.", [t.expert_pressure for t in traces]
        )
        yield from engine_gauges(
            "trace_age_seconds",
            "Age of an engine's latest trace, infinite before the first; the oldest.",
            ages_S,
            max(ages_S),
        )

    def _engines(self, status: Status) -> Iterator[Metric]:
        pages = self._core.config.engine.num_pages
        used_S = [1 - free / pages for free in status.free_pages_S]
        mean = sum(used_S) / len(used_S)
        yield from engine_gauges("kv_cache_usage_perc", "Share of KV pages in use, 1 is all.", used_S, mean)
        yield from engine_gauges("free_pages", "KV pages that no request holds.", status.free_pages_S)
        yield from engine_counters("num_preemptions", "Requests put back for want of pages.", status.preemptions_S)
        yield from engine_counters("computed_tokens", "Tokens that went through the model.", status.tokens_computed_S)
        yield from engine_counters(
            "prefill_tokens_computed", "Prefill tokens that went through the model.", status.prefill_tokens_S
        )
        yield from engine_gauges(
            "cached_pages", "KV pages that hold a known beginning, in use or not.", status.cached_pages_S
        )
        yield from engine_counters(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", status.prefix_queries_S
        )
        yield from engine_counters(
            "prefix_cache_hits", "Those of them that the prefix cache held.", status.prefix_hits_S
        )
        yield CounterMetricFamily("gimbal_steps", "Steps since start.", status.step)
        yield histogram("gimbal_step_seconds", "Steps by their time on the devices.", status.step_seconds)
        yield histogram("gimbal_step_tokens", "Steps by the tokens of all engines in them.", status.step_tokens)
        phases = GaugeMetricFamily(
            "gimbal_tick_phase_seconds",
            "How long each part of a tick takes: mean, p50 and p99 of the last ticks that had a step.",
            labels=["phase", "statistic"],
        )
        for phase in status.phases:
            for statistic, value in (("mean", phase.mean_s), ("p50", phase.p50_s), ("p99", phase.p99_s)):
                phases.add_metric([phase.name, statistic], value)
        yield phases
        yield CounterMetricFamily(
            "gimbal_compiles_after_warmup", "Compilations while serving: a bug.", status.compiles_after_warmup
        )

    def _dispatch(self) -> Iterator[Metric]:
        dispatcher = self._frontend.dispatcher
        yield counters("gimbal_dispatches", "Dispatch decisions by rule.", "rule", dict(self._frontend.counters.rules))
        yield from engine_gauges(
            "dispatch_compensation_tokens",
            "Prefill tokens sent to an engine that its trace does not show yet.",
            dispatcher.compensation_S,
        )
        scores = GaugeMetricFamily(
            "gimbal_engine_dispatch_score",
            "Summands of the engines' scores in the last decision, where its rule compared any.",
            labels=["engine", "term"],
        )
        for term, values_S in (dispatcher.recent[-1].decision.terms if dispatcher.recent else {}).items():
            for engine, value in by_engine(values_S).items():
                scores.add_metric([engine, term], value)
        yield scores
