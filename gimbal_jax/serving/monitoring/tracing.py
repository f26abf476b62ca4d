"""OpenTelemetry spans: one a request, with child spans for queue, prefill and decode. Needs the extra ``otel``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from gimbal_jax.serving.frontend.record import RequestRecord
from gimbal_jax.version import __version__

EXPORT_S = 3
"""Seconds that one batch of spans has to reach the collector."""
MISSING = "--otlp-traces-endpoint needs OpenTelemetry. Run pip install '.[otel]' in the clone."


def phases(record: RequestRecord) -> Iterator[tuple[str, float, float]]:
    """Yield (name, begin, end) of the phases that a request reached, in seconds from its arrival."""
    queued = record.total_s if record.queue_s is None else record.queue_s
    yield "queue", 0.0, queued
    if record.queue_s is not None:
        first = record.total_s if record.first_token_s is None else record.first_token_s
        yield "prefill", queued, first
        if record.first_token_s is not None:
            yield "decode", first, record.total_s


def attributes(record: RequestRecord, model: str) -> dict[str, Any]:
    """Return the attributes of a request's span.

    The names are vLLM's, which extend OpenTelemetry's for generative AI, and ``gimbal.*``.
    """
    values: dict[str, Any] = {
        "gen_ai.request.id": record.request_id,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [record.outcome],
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.output_tokens,
        "gen_ai.latency.e2e": record.total_s,
        "gen_ai.latency.time_in_queue": record.queue_s,
        "gen_ai.latency.time_to_first_token": record.first_token_s,
        "gimbal.client": record.origin.client,
        "gimbal.engine": record.engine,
        "gimbal.dispatch.rule": record.rule,
        "gimbal.priority": record.priority,
        "gimbal.cached_tokens": record.cached_tokens,
    }
    for name, begin, end in phases(record):
        if name != "queue":
            values[f"gen_ai.latency.time_in_model_{name}"] = end - begin
    return {name: value for name, value in values.items() if value is not None}


def tracer(endpoint: str, name: str, wall_clock_ns: Callable[[], int] = time.time_ns) -> Tracer:
    """Return a Tracer that sends spans to an OTLP collector by gRPC, as service ``name``.

    ``endpoint`` is http://HOST:PORT, or https://HOST:PORT for TLS. Raises ValueError for another endpoint, and
    ImportError without OpenTelemetry.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"the traces endpoint must be http://HOST:PORT or https://HOST:PORT, not {endpoint!r}")
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ImportError(MISSING) from error
    provider = TracerProvider(
        resource=Resource.create({"service.name": name, "service.version": __version__}), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S)))
    return Tracer(provider, name, wall_clock_ns)


class Tracer:
    """Exporter of spans. Call it with every record.

    A thread sends spans in batches. Spans that no collector accepts are dropped.
    """

    def __init__(self, provider: Any, name: str, wall_clock_ns: Callable[[], int]) -> None:
        self._provider, self._name, self._wall_clock_ns = provider, name, wall_clock_ns
        self._tracer = provider.get_tracer("gimbal_jax", __version__)

    def __call__(self, record: RequestRecord) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        arrival = self._wall_clock_ns() - round(record.total_s * 1e9)
        parent = TraceContextTextMapPropagator().extract({"traceparent": record.origin.traceparent})

        def at(seconds: float) -> int:
            return arrival + round(seconds * 1e9)

        span = self._tracer.start_span(
            "llm_request", parent, SpanKind.SERVER, attributes(record, self._name), start_time=arrival
        )
        if record.outcome in ("error", "refused"):
            span.set_status(Status(StatusCode.ERROR, record.error))
        for name, begin, end in phases(record):
            self._tracer.start_span(name, set_span_in_context(span), start_time=at(begin)).end(at(end))
        span.end(at(record.total_s))

    def close(self) -> None:
        """Send the remaining spans. Gives up after some seconds if no collector accepts them."""
        self._provider.shutdown()
