"""Request bytes that cannot be parsed, over a socket."""

import asyncio

import grpc
import pytest

from tests.serving.fake_server import FakeCore, running_server

METHODS = (
    "/vllm.grpc.engine.VllmEngine/Generate",
    "/vllm.grpc.engine.VllmEngine/Abort",
    "/gimbal.v1.Control/GetCounts",
)
NONSENSE, CUT, NOT_UTF8 = b"\xff\xff\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe"
CASES = [(method, data) for method in METHODS for data in (NONSENSE, CUT)]


def answer(method: str, data: bytes) -> bytes:
    async def ask() -> bytes:
        with FakeCore() as core:
            async with running_server(core) as (_, port, *_), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                return b"".join([part async for part in channel.unary_stream(method)(data, timeout=5)])

    return asyncio.run(ask())


@pytest.mark.parametrize(("method", "data"), [*CASES, (METHODS[0], NOT_UTF8), (METHODS[1], NOT_UTF8)])
def test_malformed_request_is_an_invalid_argument(method, data, caplog):
    with pytest.raises(grpc.RpcError) as rejected:
        answer(method, data)
    assert rejected.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "the request cannot be parsed" in rejected.value.details()
    assert not caplog.records


def test_empty_bytes_are_an_empty_request():
    assert answer("/vllm.grpc.engine.VllmEngine/HealthCheck", b"")
