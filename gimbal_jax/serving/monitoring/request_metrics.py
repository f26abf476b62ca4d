"""Histograms and counters of ended requests. Names and buckets are vLLM's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from gimbal_jax.config import ServerConfig
from gimbal_jax.serving.engine.meters import Histogram
from gimbal_jax.serving.frontend.record import RequestRecord
from gimbal_jax.serving.monitoring.families import engine_histograms

TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
TPOT_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY_BOUNDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
ENDS = ("stop", "length", "abort", "error", "cancelled")
"""Outcomes of requests that were not rejected: vLLM's finish reasons, and "cancelled" if the client left."""
COMPLETE = ("stop", "length")
"""Outcomes of complete requests."""

TEXTS = {
    "time_to_first_token_seconds": "Seconds from arrival to the first token.",
    "request_time_per_output_token_seconds": "Mean seconds per output token after the first, of each complete request.",
    "e2e_request_latency_seconds": "Seconds from arrival to the end, of complete requests.",
    "request_queue_time_seconds": "Seconds from arrival to the first step.",
    "request_prefill_time_seconds": "Seconds from the first step to the first token.",
    "request_decode_time_seconds": "Seconds from the first token to the end, of complete requests.",
    "request_prompt_tokens": "Prompt tokens of complete requests.",
    "request_generation_tokens": "Output tokens of complete requests.",
    "request_prefill_kv_computed_tokens": "Prompt tokens that the prefix cache did not hold, of complete requests.",
}
"""Description of each histogram, by its name without prefix."""


def token_bounds(most: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20, 50, ... up to ``most``."""
    return tuple(
        bound for power in range(len(str(most))) for bound in (10**power, 2 * 10**power, 5 * 10**power) if bound <= most
    )


def measured(record: RequestRecord) -> dict[str, float]:
    """Return what a request adds to each histogram. A request that ended early adds the phases that it reached."""
    values: dict[str, float | None] = {"request_queue_time_seconds": record.queue_s}
    if record.first_token_s is not None:
        values["time_to_first_token_seconds"] = record.first_token_s
        values["request_prefill_time_seconds"] = record.first_token_s - (record.queue_s or 0.0)
    if record.outcome in COMPLETE:
        values["e2e_request_latency_seconds"] = record.total_s
        values["request_time_per_output_token_seconds"] = record.token_s
        values["request_prompt_tokens"] = record.prompt_tokens
        values["request_generation_tokens"] = record.output_tokens
        if record.cached_tokens is not None:
            values["request_prefill_kv_computed_tokens"] = record.prompt_tokens - record.cached_tokens
        if record.first_token_s is not None:
            values["request_decode_time_seconds"] = record.total_s - record.first_token_s
    return {name: value for name, value in values.items() if value is not None}


class RequestHistograms:
    """Histograms of ``TEXTS`` and outcomes of requests, per engine."""

    def __init__(self, config: ServerConfig) -> None:
        tokens = token_bounds(config.engine.max_model_len)
        bounds = {
            "time_to_first_token_seconds": TTFT_BOUNDS,
            "request_time_per_output_token_seconds": TPOT_BOUNDS,
            "request_prompt_tokens": tokens,
            "request_generation_tokens": tokens,
            "request_prefill_kv_computed_tokens": tokens,
        }
        self._histograms_S = [
            {name: Histogram(bounds.get(name, LATENCY_BOUNDS)) for name in TEXTS} for _ in range(config.mesh.dp)
        ]
        self._outcomes: Counter[tuple[int, str]] = Counter()

    def observe(self, record: RequestRecord) -> None:
        """Add a request that has ended. A request without an engine is in the frontend's counters only."""
        if record.engine is None:
            return
        self._outcomes[record.engine, record.outcome] += 1
        for name, value in measured(record).items():
            self._histograms_S[record.engine][name].observe(value)

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        for name, text in TEXTS.items():
            yield from engine_histograms(name, text, [histograms[name].record() for histograms in self._histograms_S])
        ended = CounterMetricFamily(
            "gimbal_engine_request_success",
            "Ended requests by finish reason.",
            labels=["engine", "finished_reason"],
        )
        refused = CounterMetricFamily(
            "gimbal_engine_requests_refused",
            "Requests rejected by the engine's full queue.",
            labels=["engine"],
        )
        for engine in range(len(self._histograms_S)):
            refused.add_metric([str(engine)], self._outcomes[engine, "refused"])
            for end in ENDS:
                ended.add_metric([str(engine), end], self._outcomes[engine, end])
        yield from (ended, refused)
