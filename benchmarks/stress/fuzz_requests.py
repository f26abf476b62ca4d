"""Requests of a hostile client, drawn by hypothesis, each with the statuses that it may get."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2 as pb

from gimbal_jax.config import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_IDS
from gimbal_jax.protos import control_pb2

TIMEOUT_S = 3.0
BIG = 10 * 2**20
FINE = {
    "OK",
    "INVALID_ARGUMENT",
    "UNIMPLEMENTED",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "FAILED_PRECONDITION",
}
"""Statuses that any request may get. UNKNOWN and INTERNAL are not among them: a handler raised an exception."""

type Send = Callable[[Target], Awaitable[Answer]]


@dataclass(frozen=True)
class Target:
    """The three ports of a server. ``channel`` is connected to the first, HOST:PORT."""

    channel: grpc.aio.Channel
    host: str
    port: int
    operators_port: int
    http_port: int
    model: str


@dataclass(frozen=True)
class Answer:
    """The server's answer to one hostile request."""

    kind: str
    status: str
    finding: str = ""
    """Why the answer is wrong; empty if it is right."""


# -- messages with hostile values in their fields ----------------------------------------

INTEGERS = st.sampled_from([0, 1, -1, 2, 20, 21, 300, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1]) | st.integers(-9, 9)
FLOATS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-9, 3e38, -3e38, float("nan"), float("inf"), -float("inf")])
LONG = st.integers(50_000, 100_000).map(lambda length: "a" * length)
STRINGS = st.sampled_from(["", "\x00", "../../etc/passwd", "{", '{"type": "object"}', "(a*)*b", "\u202e"])
MAX_BYTES = 2**20
"""Maximum bytes of a message that repetition makes longer."""
TEXTS = STRINGS | LONG | st.text(max_size=20)


def value_of(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    """Return hostile values of one field, within the range of its type: a client cannot encode others."""
    kind = field.type
    if kind == FieldDescriptor.TYPE_MESSAGE:
        return message_of(field.message_type, depth + 1)
    if kind in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return FLOATS
    if kind == FieldDescriptor.TYPE_STRING:
        return TEXTS
    if kind == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=20)
    if kind == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    bits = 64 if field.cpp_type in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64) else 32
    unsigned = field.cpp_type in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)
    low, high = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return INTEGERS.map(lambda number: min(max(number, low), high))


def message_of(descriptor: Descriptor, depth: int = 0) -> st.SearchStrategy[Message]:
    """Return messages with some fields set to hostile values."""
    if depth > 3:
        return st.just(GetMessageClass(descriptor)())

    @st.composite
    def build(draw: st.DrawFn) -> Message:
        message = GetMessageClass(descriptor)()
        fields = draw(st.lists(st.sampled_from(list(descriptor.fields)), max_size=6, unique_by=lambda one: one.name))
        for one_field in fields:
            name = one_field.name
            if one_field.is_repeated:
                if one_field.message_type is not None and one_field.message_type.GetOptions().map_entry:
                    continue  # BAD_PARAMS has the maps that matter
                few, times = draw(st.lists(value_of(one_field, depth), max_size=3)), draw(st.sampled_from([1, 1, 500]))
                getattr(message, name).extend(few)
                if times * message.ByteSize() < MAX_BYTES:  # nested repetition would need gigabytes
                    getattr(message, name).extend(few * (times - 1))
            elif one_field.message_type is not None:
                getattr(message, name).CopyFrom(draw(value_of(one_field, depth)))
            else:
                setattr(message, name, draw(value_of(one_field, depth)))
        return message

    return build() if descriptor.fields else st.just(GetMessageClass(descriptor)())


METHODS = [
    method
    for file in (pb, control_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


def any_message() -> st.SearchStrategy[Send]:
    return st.sampled_from(METHODS).flatmap(
        lambda method: message_of(method.input_type).map(lambda message: sending(method, message.SerializeToString()))
    )


def any_bytes() -> st.SearchStrategy[Send]:
    """Return bytes that are no message, and messages that have invalid UTF-8 or are cut short."""
    request = generate_request()
    invalid = request.SerializeToString().replace(b"hello", b"\xff\xfe\xfd\xfc\xfb")
    cut = st.integers(1, len(invalid) - 1).map(lambda end: request.SerializeToString()[:end])
    return st.tuples(st.sampled_from(METHODS), st.binary(max_size=200) | st.just(invalid) | cut).map(
        lambda drawn: sending(drawn[0], drawn[1], "bytes")
    )


# -- valid requests with one field out of its range: their status is known -----------------


def generate_request(text: str = "hello", **params: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, sampling_params=pb.SamplingParams(**{"max_tokens": 3, **params}))


NOT_FINITE = st.sampled_from([float("nan"), float("inf"), -float("inf")])
BAD_PARAMS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": NOT_FINITE | st.floats(-1e30, -0.01),
    "top_p": NOT_FINITE | st.floats(1.01, 1e30) | st.floats(-1e30, -0.01),
    "min_p": NOT_FINITE | st.floats(1.01, 1e30) | st.floats(-1e30, -0.01),
    "frequency_penalty": NOT_FINITE | st.floats(2.1, 1e30) | st.floats(-1e30, -2.1),
    "presence_penalty": NOT_FINITE | st.floats(2.1, 1e30) | st.floats(-1e30, -2.1),
    "repetition_penalty": NOT_FINITE | st.floats(-1e30, -0.01),
    "max_tokens": st.just(0),
    "min_tokens": st.integers(4, 2**32 - 1),
    "logprobs": st.integers(MAX_LOGPROBS + 1, 2**31 - 1) | st.integers(-(2**31), -2),
    "prompt_logprobs": st.integers(MAX_LOGPROBS + 1, 2**31 - 1) | st.integers(-(2**31), -2),
    "seed": st.integers(-(2**31), -1),
    "n": st.integers(1000, 2**32 - 1),
    "stop": st.just([""]),
    "stop_token_ids": st.just([2**32 - 1]) | st.just(list(range(MAX_STOP_IDS + 1))),
    "logit_bias": st.just({-1: 1.0})
    | st.just({2**31 - 1: 1.0})
    | st.just({1: float("nan")})
    | st.just({1: 101.0})
    | st.just(dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
    "json_schema": st.sampled_from(["", "{", "[1, 2", '{"type": "nonsense"}']),
    "regex": st.sampled_from(["(", "a{2,1}", "[z-a]"]),
}
WRONG_ELSEWHERE = [
    pb.GenerateRequest(text="", sampling_params=pb.SamplingParams(max_tokens=3)),
    pb.GenerateRequest(tokenized=pb.TokenizedInput(), sampling_params=pb.SamplingParams(max_tokens=3)),
    pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[2**32 - 1])),
    pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[1] * 100_000)),
    pb.GenerateRequest(text="hello", request_id="x" * 300),
    pb.GenerateRequest(text="hello", data_parallel_rank=-1),
    pb.GenerateRequest(text="hello", data_parallel_rank=7),
]
UNSUPPORTED = [
    pb.GenerateRequest(text="hello", kv_transfer_params_json="{}"),
    pb.GenerateRequest(text="hello", mm_inputs=pb.MultimodalInputs()),
    pb.GenerateRequest(text="hello", media_refs=pb.MediaRefs(items=[pb.MediaRef(url="file:///etc/passwd")])),
]
GENERATE = pb.DESCRIPTOR.services_by_name["VllmEngine"].methods_by_name["Generate"]


def one_wrong_field() -> st.SearchStrategy[Send]:
    named = st.sampled_from(sorted(BAD_PARAMS)).flatmap(
        lambda name: BAD_PARAMS[name].map(lambda value: (f"bad {name}", generate_request(**{name: value})))
    )
    elsewhere = st.sampled_from(WRONG_ELSEWHERE).map(lambda request: ("bad request", request))
    unsupported = st.sampled_from(UNSUPPORTED).map(
        lambda request: sending(GENERATE, request.SerializeToString(), "unsupported", {"UNIMPLEMENTED"})
    )
    wrong = (named | elsewhere).map(
        lambda drawn: sending(GENERATE, drawn[1].SerializeToString(), drawn[0], {"INVALID_ARGUMENT"})
    )
    return wrong | unsupported


# -- sending -------------------------------------------------------------------------------


def sending(method: MethodDescriptor, data: bytes, kind: str = "", fine: set[str] = FINE) -> Send:
    """Return a function that sends bytes to a method and reads the whole answer."""
    path = f"/{method.containing_service.full_name}/{method.name}"

    async def send(target: Target) -> Answer:
        call = target.channel.unary_stream(path)(data, timeout=TIMEOUT_S)
        status = await status_of(call)
        bad = "" if status.partition(":")[0] in fine else f"{status}: {await call.details()}"
        return Answer(kind or method.name, status, bad)

    return send


async def status_of(call: Any) -> str:
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


def huge_prompt() -> st.SearchStrategy[Send]:
    """Return prompts of 10 MB, rejected by the prompt's length, and of 20 MB, above the limit of a message."""

    def request(size: int) -> pb.GenerateRequest:
        return generate_request("hello " * (size // 6))

    small = st.just(sending(GENERATE, request(BIG).SerializeToString(), "10 MB prompt", {"INVALID_ARGUMENT"}))
    large = st.just(sending(GENERATE, request(2 * BIG).SerializeToString(), "20 MB prompt", {"RESOURCE_EXHAUSTED"}))
    return small | large


def slow_reader() -> st.SearchStrategy[Send]:
    """Return a client that requests a long output, reads nothing, and leaves."""

    async def send(target: Target) -> Answer:
        request = pb.GenerateRequest(
            text="hello", stream=True, sampling_params=pb.SamplingParams(max_tokens=500, ignore_eos=True)
        )
        call = target.channel.unary_stream(f"/{GENERATE.containing_service.full_name}/Generate")(
            request.SerializeToString()
        )
        await asyncio.sleep(0.5)
        call.cancel()
        return Answer("slow reader", "left")

    return st.just(send)


HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">I", 0)[1:] + b"\x04\x00" + struct.pack(">I", 0)


def half_open() -> st.SearchStrategy[Send]:
    """Return connections that start HTTP/2 and stop, or send random bytes."""

    def send(data: bytes) -> Send:
        async def connect(target: Target) -> Answer:
            _, writer = await asyncio.open_connection(target.host, target.port)
            writer.write(data)
            await asyncio.sleep(0.3)
            writer.transport.abort()
            return Answer("half-open connection", "left")

        return connect

    frames = st.binary(max_size=60).map(lambda tail: HTTP2_PREFACE + tail)
    return (st.sampled_from([b"", HTTP2_PREFACE[:10], HTTP2_PREFACE]) | frames | st.binary(max_size=60)).map(send)


def http_request(head: str, body: bytes) -> bytes:
    return f"{head} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


async def http_status(host: str, port: int, data: bytes) -> int | None:
    """Return the status of a raw HTTP request; None if the server closed the connection without one."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(data)
        line = await asyncio.wait_for(reader.readline(), TIMEOUT_S)
        parts = line.split()
        return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else None
    except ConnectionError:
        return None
    finally:
        writer.transport.abort()


def operators_http() -> st.SearchStrategy[Send]:
    verbs = st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "BREW"])
    paths = st.sampled_from(["/", "/metrics", "/health", "/ready", "/dashboard", "/dashboard/data", "/../etc/passwd"])
    odd = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=50).map(lambda text: "/" + text)
    requests = st.tuples(verbs, paths | odd).map(lambda drawn: http_request(f"{drawn[0]} {drawn[1]}", b""))

    def send(data: bytes) -> Send:
        async def ask(target: Target) -> Answer:
            status = await http_status(target.host, target.operators_port, data)
            return Answer("operators' HTTP", str(status), f"{status} for {data!r}" if status in (500, 502) else "")

        return ask

    return (requests | st.binary(min_size=1, max_size=100).map(lambda data: data + b"\r\n\r\n")).map(send)


JSON_VALUES: st.SearchStrategy[Any] = LONG | st.sampled_from(
    [None, True, -1, 0, 1e308, 10**30, "", "x", [], {}, [{}], {"type": "json_schema"}, float("nan")]
)
OPENAI_FIELDS = (
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "temperature",
    "top_p",
    "n",
    "stop",
    "stream",
    "seed",
    "logit_bias",
    "logprobs",
    "response_format",
    "tools",
    "frequency_penalty",
    "presence_penalty",
)


def openai_http() -> st.SearchStrategy[Send]:
    """Return malformed JSON, and JSON with hostile values, for the gateway. A 5xx of the gateway is not a finding."""
    good = {"prompt": "hello", "max_tokens": 3}
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    hostile = st.tuples(
        st.sampled_from([("/v1/completions", good), ("/v1/chat/completions", chat)]),
        st.dictionaries(st.sampled_from(OPENAI_FIELDS), JSON_VALUES, min_size=1, max_size=3),
    ).map(lambda drawn: (drawn[0][0], drawn[0][1] | drawn[1]))
    garbage = st.binary(max_size=100).map(lambda body: ("/v1/completions", body))

    def send(drawn: tuple[str, dict[str, Any] | bytes]) -> Send:
        async def ask(target: Target) -> Answer:
            path, body = drawn
            data = body if isinstance(body, bytes) else json.dumps({"model": target.model} | body).encode()
            data = http_request(f"POST {path}", data).replace(b"Host: x", b"Host: x\r\nContent-Type: application/json")
            try:
                status = await http_status(target.host, target.http_port, data)
            except TimeoutError:
                status = None
            return Answer("OpenAI HTTP", str(status))

        return ask

    return (hostile | garbage).map(send)


HOSTILE = st.one_of(
    any_message(), any_message(), any_bytes(), one_wrong_field(), one_wrong_field(), operators_http(), openai_http()
)
RARE = st.one_of(huge_prompt(), slow_reader(), half_open())
