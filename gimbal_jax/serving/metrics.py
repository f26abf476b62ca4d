"""Prometheus metrics: the core's status and the frontend's counters, read at each scrape."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gimbal_jax.scheduler.traffic import imbalance_L, remote_share
from gimbal_jax.serving.frontend import Core, Frontend
from gimbal_jax.version import __version__

STATES = ("warming", "serving", "draining", "stopped", "failed")


@contextlib.contextmanager
def serve_metrics(core: Core, frontend: Frontend, port: int) -> Iterator[int]:
    """Serve /metrics on loopback in a thread of its own; yields the port (a free one for 0)."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(core, frontend))
    server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class StatusCollector(Collector):
    """Per-engine gauges are named ``gimbal_engine_*``; each has a sum over engines, ``gimbal_*``."""

    def __init__(self, core: Core, frontend: Frontend) -> None:
        self._core = core
        self._frontend = frontend
        self._start = frontend.clock()

    def describe(self) -> list[Metric]:
        return []  # Registration must not scrape a core that is still warming up.

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("gimbal_build", "Version of the server.", {"version": __version__})
        yield from self._requests()
        yield from self._engines()
        yield from self._loop()

    def _requests(self) -> Iterator[Metric]:
        counters = self._frontend.counters
        yield GaugeMetricFamily("gimbal_active_requests", "Requests that are streaming now.", self._frontend.active)
        yield _labelled("gimbal_requests", "Ended requests by outcome.", "outcome", dict(counters.outcomes))
        yield _labelled("gimbal_dispatches", "Dispatch decisions by rule.", "rule", dict(counters.rules))
        yield CounterMetricFamily("gimbal_prompt_tokens", "Prompt tokens accepted.", counters.prompt_tokens)
        yield CounterMetricFamily("gimbal_generated_tokens", "Tokens sent to clients.", counters.generated_tokens)
        yield SummaryMetricFamily(
            "gimbal_time_to_first_token_seconds",
            "Time from arrival to the first token.",
            counters.first_tokens,
            counters.first_token_seconds,
        )

    def _engines(self) -> Iterator[Metric]:
        traces = self._core.traces
        now = self._frontend.clock()
        yield from _per_engine(
            "running_requests", "Requests with a row in the step.", [t.running_requests for t in traces]
        )
        yield from _per_engine("waiting_requests", "Requests in the queue.", [t.waiting_requests for t in traces])
        yield from _per_engine(
            "prefill_tokens",
            "Prefill tokens still to do, of running and waiting requests.",
            [t.running_prefill_tokens + t.waiting_prefill_tokens for t in traces],
        )
        yield from _per_engine(
            "kv_tokens", "Tokens of running requests in the KV cache.", [t.kv_tokens for t in traces]
        )
        yield from _per_engine("waiting_tokens", "Lengths of the waiting requests.", [t.waiting_tokens for t in traces])
        yield from _per_engine(
            "expert_pressure", "Expert tokens per step, in token equivalents.", [t.expert_pressure for t in traces]
        )
        yield GaugeMetricFamily(
            "gimbal_central_queue_requests", "Requests that have no engine yet.", self._core.central_queue
        )
        yield _gauges("gimbal_engine_kv_use", "Share of KV pages in use.", [t.kv_use for t in traces])
        # Infinite before the first trace: an alarm on it must not stay silent.
        oldest = max((now - trace.time for trace in traces), default=math.inf)
        yield GaugeMetricFamily("gimbal_oldest_trace_age_seconds", "Age of the oldest engine's trace.", oldest)

    def _loop(self) -> Iterator[Metric]:
        status = self._core.status()
        now = self._frontend.clock()
        states = GaugeMetricFamily("gimbal_state", "1 for the state that the server is in.", labels=["state"])
        for state in STATES:
            states.add_metric([state], float(status.state == state))
        yield states
        yield from _per_engine("free_pages", "KV pages that no request holds.", status.free_pages_S)
        yield CounterMetricFamily("gimbal_steps", "Steps since start.", status.step)
        tokens = CounterMetricFamily(
            "gimbal_engine_computed_tokens", "Tokens that went through the model.", labels=["engine"]
        )
        for engine, value in enumerate(status.tokens_computed_S):
            tokens.add_metric([str(engine)], value)
        yield tokens
        yield CounterMetricFamily(
            "gimbal_computed_tokens", "Tokens that went through the model, all engines.", sum(status.tokens_computed_S)
        )
        yield CounterMetricFamily("gimbal_preemptions", "Requests put back for want of pages.", status.preemptions)
        yield CounterMetricFamily("gimbal_experts_moved", "Experts that changed their rank.", status.experts_moved)
        yield CounterMetricFamily("gimbal_moved_bytes", "Bytes of moved experts.", status.bytes_moved)
        yield CounterMetricFamily("gimbal_windows_written", "Traffic windows written to files.", status.windows_written)
        yield CounterMetricFamily("gimbal_windows_lost", "Windows that could not be written.", status.windows_lost)
        yield CounterMetricFamily(
            "gimbal_compiles_after_warmup",
            "Compilations while serving: a bug.",
            status.compiles_after_warmup,
        )
        ranks = self._core.config.mesh.ranks
        counts_LSE, slot_of_expert_LE = status.window_counts_LSE, status.slot_of_expert_LE
        yield GaugeMetricFamily(
            "gimbal_rank_imbalance",
            "Max over mean rank load, mean over layers, of the last window under today's placement.",
            float(imbalance_L(counts_LSE, slot_of_expert_LE, ranks).mean()),
        )
        yield GaugeMetricFamily(
            "gimbal_remote_share",
            "Share of the last window's expert tokens that leave their engine's ranks, under today's placement.",
            float(remote_share(counts_LSE, slot_of_expert_LE, ranks)),
        )
        decided = status.placements[-1].time if status.placements else self._start
        rebalanced = self._start if status.last_rebalance is None else status.last_rebalance
        yield GaugeMetricFamily(
            "gimbal_last_placement_decision_age_seconds",
            "Time since a placement was last decided on, applied or not; since start before the first.",
            now - decided,
        )
        yield GaugeMetricFamily(
            "gimbal_last_rebalance_age_seconds",
            "Time since a new placement was last complete; since start before the first.",
            now - rebalanced,
        )


def _gauges(name: str, text: str, values_S: Sequence[float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=["engine"])
    for engine, value in enumerate(values_S):
        family.add_metric([str(engine)], value)
    return family


def _per_engine(name: str, text: str, values_S: Sequence[float]) -> Iterator[Metric]:
    yield _gauges(f"gimbal_engine_{name}", text, values_S)
    yield GaugeMetricFamily(f"gimbal_{name}", f"{text} All engines.", sum(values_S))


def _labelled(name: str, text: str, label: str, values: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
