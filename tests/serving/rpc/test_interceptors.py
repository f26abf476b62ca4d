"""API keys, limits of each client, and malformed requests, over real sockets."""

import asyncio
import contextlib
import datetime

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from gimbal_jax.config import NetworkConfig
from gimbal_jax.protos import control_pb2, control_pb2_grpc
from gimbal_jax.serving.rpc import interceptors
from gimbal_jax.serving.rpc.listen import MAX_METADATA_BYTES
from tests.serving.fake_server import FakeCore, running_server, until

KEY, OLD_KEY, OTHER_KEY = "right-key-0123456789", "old-key-0123456789ab", "other-key-0123456789"
KEY_FILE = f"# for tests\n{KEY} alice\n\n{OLD_KEY} bob 2027-01-31T00:00:00Z  # rotated\n{OTHER_KEY}\n"
EXPIRY = datetime.datetime(2027, 1, 31, tzinfo=datetime.UTC).timestamp()
CODES = grpc.StatusCode
ONE_TOKEN = pb.SamplingParams(max_tokens=1)


def bearer(key):
    return (("authorization", f"Bearer {key}"),)


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text(KEY_FILE)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    "peer, client",
    [("ipv4:10.0.0.7:5012", "10.0.0.7"), ("ipv6:%5Bfe80::1%25eth0%5D:5012", "fe80::1%eth0"), ("", "")],
)
def test_addresses_have_no_port(peer, client):
    assert interceptors._address(peer) == client


def run(test, core, config, **options):
    async def limited():
        async with (
            asyncio.timeout(120),
            running_server(core, network=config, **options) as (_, port, *_),
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            await test(channel)

    with core:
        asyncio.run(limited())


async def outcome(call):
    """The status code of a call and its text."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    return await call.code(), await call.details()


def request():
    return pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[1]), sampling_params=ONE_TOKEN)


async def reflect():
    yield reflection_pb2.ServerReflectionRequest(list_services="")


async def send_nothing():
    await asyncio.Event().wait()
    yield


def calls_of_every_kind(channel, metadata):
    engine, control = pb_grpc.VllmEngineStub(channel), control_pb2_grpc.ControlStub(channel)
    return [
        engine.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata),
        engine.Generate(request(), metadata=metadata),
        control.GetStatus(control_pb2.GetStatusRequest(), metadata=metadata),
        reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(reflect(), metadata=metadata),
    ]


def test_every_service_requires_a_valid_key(key_file):
    async def test(channel):
        async def outcomes(metadata):
            return [await outcome(call) for call in calls_of_every_kind(channel, metadata)]

        for key in (KEY, OTHER_KEY):
            assert await outcomes(bearer(key)) == [(CODES.OK, "")] * 4
        for metadata, text in [
            (None, "no API key"),
            (bearer(KEY + "x"), "wrong API key"),
            (bearer(""), "wrong API key"),
            ((("authorization", KEY),), "authorization must be 'Bearer KEY'"),
            ((("authorization", f"Basic {KEY}"),), "authorization must be 'Bearer KEY'"),
            (bearer(OLD_KEY), "the API key 'bob' has expired"),
        ]:
            for code, details in await outcomes(metadata):
                assert code is CODES.UNAUTHENTICATED and details.startswith(text)
                assert not any(key in details for key in (KEY, OLD_KEY))

    run(test, FakeCore(), NetworkConfig(port=0, api_keys=key_file), wall_clock=lambda: EXPIRY)


def test_a_rejected_call_that_sends_nothing_ends(key_file):
    async def test(channel):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        code, _ = await outcome(stub.ServerReflectionInfo(send_nothing()))
        assert code is CODES.UNAUTHENTICATED

    run(test, FakeCore(), NetworkConfig(port=0, api_keys=key_file))


def test_health_needs_no_key(key_file):
    async def test(channel):
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()

    run(test, FakeCore(), NetworkConfig(port=0, api_keys=key_file))


def test_an_unknown_method_is_unimplemented_only_with_a_key(key_file):
    async def test(channel):
        method = channel.unary_unary("/no.Service/Method")
        assert (await outcome(method(b"", metadata=bearer(KEY))))[0] is CODES.UNIMPLEMENTED
        assert (await outcome(method(b"")))[0] is CODES.UNAUTHENTICATED

    run(test, FakeCore(), NetworkConfig(port=0, api_keys=key_file))


def test_streams_of_each_client_are_limited(key_file):
    core = FakeCore(paused=True)

    async def test(channel):
        stub = pb_grpc.VllmEngineStub(channel)
        live = [asyncio.create_task(outcome(stub.Generate(request(), metadata=bearer(KEY)))) for _ in range(3)]
        await until(lambda: len(core.live) == 3)
        assert await outcome(stub.Generate(request(), metadata=bearer(KEY))) == (
            CODES.RESOURCE_EXHAUSTED,
            "alice has 3 requests already (max_streams_per_client)",
        )
        # Other clients, and other calls of this one, go on.
        live.append(asyncio.create_task(outcome(stub.Generate(request(), metadata=bearer(OTHER_KEY)))))
        await stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=bearer(KEY))
        await until(lambda: len(core.live) == 4)
        live.pop(0).cancel()
        await until(lambda: len(core.live) == 3)
        live.append(asyncio.create_task(outcome(stub.Generate(request(), metadata=bearer(KEY)))))
        await until(lambda: len(core.live) == 4)
        core.paused = False
        assert await asyncio.gather(*live) == [(CODES.OK, "")] * 4

    run(test, core, NetworkConfig(port=0, api_keys=key_file, max_streams_per_client=3))


def test_without_keys_clients_are_named_by_address():
    core = FakeCore(paused=True)

    async def test(channel):
        stub = pb_grpc.VllmEngineStub(channel)
        live = asyncio.create_task(outcome(stub.Generate(request(), metadata=bearer("any key"))))
        await until(lambda: core.live)
        _, text = await outcome(stub.Generate(request()))
        assert text.startswith("127.0.0.1 has 1 requests already")
        core.paused = False
        assert await live == (CODES.OK, "")

    run(test, core, NetworkConfig(port=0, max_streams_per_client=1))


def test_long_messages_and_metadata_are_rejected():
    async def test(channel):
        stub = pb_grpc.VllmEngineStub(channel)
        text = "x" * 2**20
        code, details = await outcome(stub.Generate(pb.GenerateRequest(text=text)))
        assert code is CODES.RESOURCE_EXHAUSTED and "larger than max" in details
        code, _ = await outcome(stub.Generate(request(), metadata=(("k", "x" * MAX_METADATA_BYTES),)))
        assert code is CODES.RESOURCE_EXHAUSTED
        for _ in range(20):  # grpc's own default rejects some of those that come near the limit
            assert await outcome(stub.Generate(request(), metadata=(("k", "x" * 15_000),))) == (CODES.OK, "")

    run(test, FakeCore(), NetworkConfig(port=0, max_message_mib=1))


METHODS = (
    "/vllm.grpc.engine.VllmEngine/Generate",
    "/vllm.grpc.engine.VllmEngine/Abort",
    "/gimbal.v1.Control/GetCounts",
)
NONSENSE, CUT, NOT_UTF8 = b"\xff\xff\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe"
MALFORMED = [(method, data) for method in METHODS for data in (NONSENSE, CUT)]


@pytest.mark.parametrize(("method", "data"), [*MALFORMED, (METHODS[0], NOT_UTF8), (METHODS[1], NOT_UTF8)])
def test_malformed_request_is_an_invalid_argument(method, data, caplog):
    async def test(channel):
        code, details = await outcome(channel.unary_stream(method)(data, timeout=60))
        assert code is CODES.INVALID_ARGUMENT and "the request cannot be parsed" in details

    run(test, FakeCore(), NetworkConfig(port=0))
    assert not caplog.records


def test_empty_bytes_are_an_empty_request():
    async def test(channel):
        method = channel.unary_stream("/vllm.grpc.engine.VllmEngine/HealthCheck")
        assert b"".join([part async for part in method(b"", timeout=60)])

    run(test, FakeCore(), NetworkConfig(port=0))
