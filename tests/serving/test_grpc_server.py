"""The server as a whole: health, reflection, keepalive, ports, drain."""

import asyncio
import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gimbal_jax.serving.client import GimbalClient
from gimbal_jax.serving.client_records import ClientError, Unavailable
from gimbal_jax.serving.grpc_server import serve
from tests.serving.fake_server import NO_FILES, FakeCore, running_server, until

SERVICES = ("", "vllm.grpc.engine.VllmEngine", "gimbal.v1.Control")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def run(test, core):
    """Runs an async test while the core's thread does."""

    async def limited():
        async with asyncio.timeout(20):
            await test()

    with core:
        asyncio.run(limited())


async def collect(client, **options):
    return [chunk async for chunk in client.generate(token_ids=[1], **options)]


def test_health_follows_warm_up_and_drain():
    core = FakeCore(state="warming", paused=True)

    async def test():
        async with (
            running_server(core) as (client, port, stop, _),
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            health = health_pb2_grpc.HealthStub(channel)

            async def status(service):
                return (await health.Check(health_pb2.HealthCheckRequest(service=service))).status

            watch = health.Watch(health_pb2.HealthCheckRequest())
            seen = [(await watch.read()).status]
            assert [await status(service) for service in SERVICES] == [NOT_SERVING] * 3
            with pytest.raises(Unavailable, match="warming"):
                await collect(client)

            core.state = "serving"
            seen.append((await watch.read()).status)
            assert [await status(service) for service in SERVICES] == [SERVING] * 3
            assert await client.is_serving()

            stream = asyncio.create_task(collect(client, max_tokens=2))
            await until(lambda: core.live)
            stop.set()
            seen.append((await watch.read()).status)
            watch.cancel()
            assert [await status(service) for service in SERVICES] == [NOT_SERVING] * 3
            with pytest.raises(Unavailable, match="draining"):
                await collect(client)
            core.paused = False
            assert [token for chunk in await stream for token in chunk.token_ids] == [2, 3]
            assert seen == [NOT_SERVING, SERVING, NOT_SERVING]

    run(test, core)


def test_streams_that_outlast_the_drain_end_with_unavailable():
    core = FakeCore(paused=True)

    async def test():
        async with running_server(core, drain_timeout_s=0.1) as (client, _, stop, task):
            stream = asyncio.create_task(collect(client))
            await until(lambda: core.live)
            stop.set()
            with pytest.raises(Unavailable, match="stopped before the request ended"):
                await stream
            await task
            assert core.live == []

    run(test, core)


def test_idle_server_stops_at_once():
    core = FakeCore()

    async def test():
        async with running_server(core) as (*_, stop, task):
            stop.set()
            async with asyncio.timeout(1):
                await task

    run(test, core)


def test_failed_engine_ends_all_streams():
    core = FakeCore(paused=True)

    async def test():
        async with running_server(core) as (client, *_):
            stream = asyncio.create_task(collect(client))
            await until(lambda: core.live)
            core.state = "failed"
            with pytest.raises(Unavailable, match="engine has failed"):
                await stream
            assert not await client.is_serving()

    run(test, core)


def test_reflection_lists_all_services():
    core = FakeCore()

    async def test():
        async with (
            running_server(core) as (_, port, *_),
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            requests = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="gimbal.v1.Control"),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="vllm.grpc.engine.VllmEngine"),
            ]
            services, *files = [answer async for answer in stub.ServerReflectionInfo(iter(requests))]
            assert {service.name for service in services.list_services_response.service} == {
                *SERVICES[1:],
                "grpc.health.v1.Health",
                "grpc.reflection.v1alpha.ServerReflection",
            }
            assert all(file.file_descriptor_response.file_descriptor_proto for file in files)

    run(test, core)


def test_client_pings_do_not_end_a_silent_stream():
    core = FakeCore(paused=True)
    eager = [
        ("grpc.keepalive_time_ms", 50),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]

    async def test():
        async with running_server(core) as (client, port, *_):
            client._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=eager)
            client.engine = type(client.engine)(client._channel)
            stream = asyncio.create_task(collect(client, max_tokens=1))
            await until(lambda: core.live)
            await asyncio.sleep(4.5)  # a client pings once a second; a server's default is to end it at the third
            core.paused = False
            assert (await stream)[-1].finish_reason == "length"

    run(test, core)


def test_taken_port_is_refused():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(RuntimeError, match=str(port)):
            asyncio.run(serve(FakeCore(), NO_FILES, "127.0.0.1", port, asyncio.Event()))


def test_two_servers_do_not_share_a_port():
    core = FakeCore()

    async def test():
        async with running_server(core) as (_, port, *_):
            with pytest.raises(RuntimeError, match=str(port)):
                await serve(core, NO_FILES, "127.0.0.1", port, asyncio.Event())

    run(test, core)


def test_many_streams_a_third_cancelled_leave_nothing():
    core = FakeCore()

    async def test():
        async with running_server(core) as (client, port, *_):

            async def one(index):
                chunks = client.generate(token_ids=[index], max_tokens=50, ignore_eos=True, engine=index % 2)
                async for chunk in chunks:
                    if index % 3 == 0 and chunk.completion_tokens >= index % 7 + 1:
                        await chunks.aclose()
                        return None
                return chunk

            last = await asyncio.gather(*(one(index) for index in range(64)))
            await until(lambda: not core.live)
            for index, chunk in enumerate(last):
                if index % 3:
                    assert (chunk.finish_reason, chunk.completion_tokens) == ("length", 50)
            async with GimbalClient(f"127.0.0.1:{port}") as other:
                await until_idle(other)

    async def until_idle(client):
        while (await client.status()).active_requests:
            await asyncio.sleep(0.01)

    run(test, core)


def test_no_server_is_unavailable():
    async def test():
        async with GimbalClient("127.0.0.1:1") as client:
            with pytest.raises(Unavailable):
                await client.is_serving()
            with pytest.raises(ClientError):
                await client.status()

    asyncio.run(test())
