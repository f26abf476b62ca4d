"""Spans as an OTLP collector on a socket receives them."""

import contextlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from gimbal_jax.serving.frontend.record import Origin
from gimbal_jax.serving.monitoring.tracing import MISSING, phases, tracer
from tests.serving.records import ended

NOW_NS = 1_800_000_000 * 10**9
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self):
        self.received: list[trace_service_pb2.ExportTraceServiceRequest] = []

    def Export(self, request, context):
        self.received.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self):
        return [
            span for request in self.received for r in request.resource_spans for s in r.scope_spans for span in s.spans
        ]


@contextlib.contextmanager
def collector():
    servicer = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield servicer, f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def sent(*records) -> Collector:
    with collector() as (servicer, endpoint):
        observe = tracer(endpoint, "tiny", lambda: NOW_NS)
        for record in records:
            observe(record)
        observe.close()
    return servicer


def values(span):
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def test_request_is_a_span_with_a_child_for_each_phase():
    received = sent(ended())
    (resource,) = {r.resource.SerializeToString() for request in received.received for r in request.resource_spans}
    assert b"service.name" in resource and b"tiny" in resource
    spans = {span.name: span for span in received.spans}
    assert set(spans) == {"llm_request", "queue", "prefill", "decode"}
    request = spans["llm_request"]
    assert request.kind == trace_pb2.Span.SPAN_KIND_SERVER and not request.parent_span_id
    assert {spans[name].parent_span_id for name in ("queue", "prefill", "decode")} == {request.span_id}
    assert {span.trace_id for span in spans.values()} == {request.trace_id}
    seconds = {
        name: ((s.start_time_unix_nano - NOW_NS) / 1e9, (s.end_time_unix_nano - NOW_NS) / 1e9)
        for name, s in spans.items()
    }
    assert seconds == {"llm_request": (-3, 0), "queue": (-3, -2.75), "prefill": (-2.75, -2), "decode": (-2, 0)}
    expected = {
        "gen_ai.request.id": "r-1",
        "gen_ai.response.model": "tiny",
        "gen_ai.usage.prompt_tokens": 12,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.latency.e2e": 3.0,
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_to_first_token": 1.0,
        "gen_ai.latency.time_in_model_prefill": 0.75,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gimbal.engine": 1,
        "gimbal.dispatch.rule": "least_score",
    }
    assert expected.items() <= values(request).items()
    assert request.status.code == trace_pb2.Status.STATUS_CODE_UNSET


def test_span_of_the_caller_is_the_parent():
    spans = sent(ended(origin=Origin("c", f"00-{TRACE}-{PARENT}-01"))).spans
    (request,) = [span for span in spans if span.name == "llm_request"]
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    assert {span.trace_id.hex() for span in spans} == {TRACE}


def test_unsampled_caller_gets_no_spans():
    assert not sent(ended(origin=Origin("c", f"00-{TRACE}-{PARENT}-00"))).spans


@pytest.mark.parametrize("traceparent", ["nonsense", "00-0-0-00", "\n", f"ff-{TRACE}-{PARENT}-01", "é" * 100])
def test_invalid_traceparent_starts_a_new_trace(traceparent):
    spans = sent(ended(origin=Origin("c", traceparent))).spans
    assert len(spans) == 4 and all(span.trace_id.hex() != TRACE for span in spans)


def test_error_sets_the_status_of_the_span():
    spans = sent(ended(outcome="error", error="its logits are not finite", first_token_s=None)).spans
    (request,) = [span for span in spans if span.name == "llm_request"]
    assert request.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    assert request.status.message == "its logits are not finite"
    assert "gen_ai.latency.time_to_first_token" not in values(request)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (ended(queue_s=None, first_token_s=None), [("queue", 0.0, 3.0)]),
        (ended(first_token_s=None), [("queue", 0.0, 0.25), ("prefill", 0.25, 3.0)]),
        (ended(), [("queue", 0.0, 0.25), ("prefill", 0.25, 1.0), ("decode", 1.0, 3.0)]),
    ],
)
def test_phases_end_with_the_last_one_that_the_request_reached(record, expected):
    assert list(phases(record)) == expected


def test_endpoint_without_a_scheme_is_rejected():
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        tracer("127.0.0.1:4317", "tiny")


def test_opentelemetry_is_loaded_late_and_named_if_missing():
    program = f"""
import sys
from gimbal_jax.serving.monitoring import tracing
assert not any(name.startswith("opentelemetry") for name in sys.modules)
sys.modules["opentelemetry.sdk"] = None
try:
    tracing.tracer("http://127.0.0.1:1", "tiny")
except ImportError as error:
    sys.exit(str(error) != {MISSING!r})
sys.exit(2)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
