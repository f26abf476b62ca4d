"""The server as a whole: health, reflection, keepalive, ports, drain."""

import asyncio
import contextlib
import json
import socket
import urllib.error
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as pb

from gimbal_jax.client.client import GimbalClient
from gimbal_jax.client.records import ClientError, Unavailable
from gimbal_jax.config import NetworkConfig
from gimbal_jax.serving.frontend.record import RequestRecord
from gimbal_jax.serving.gateway.gateway import Gateway
from gimbal_jax.serving.rpc import listen as network
from gimbal_jax.serving.rpc import server as grpc_server
from gimbal_jax.serving.rpc.server import serve
from tests.serving.fake_server import NO_FILES, FakeCore, running_server, until

SERVICES = ("", "vllm.grpc.engine.VllmEngine", "gimbal.v1.Control")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def run(test, core):
    """Runs an async test while the core's thread does."""

    async def limited():
        async with asyncio.timeout(120):
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


def test_an_idle_server_stops_immediately():
    core = FakeCore()

    async def test():
        async with running_server(core, drain_timeout_s=600) as (*_, stop, task):
            stop.set()
            await task

    run(test, core)


def test_failed_engine_ends_all_streams_and_the_server():
    core = FakeCore(paused=True)

    async def test():
        async with (
            running_server(core) as (client, port, _, task),
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            seen = [(await watch.read()).status]
            stream = asyncio.create_task(collect(client))
            await until(lambda: core.live)
            core.state = "failed"
            with pytest.raises(Unavailable, match="engine has failed"):
                await stream
            seen.append((await watch.read()).status)
            assert seen == [SERVING, NOT_SERVING]
            await task  # ends without the stop event

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
                *(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in SERVICES[1:]),
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


def test_keepalive_cancels_requests_of_vanished_clients(monkeypatch):
    monkeypatch.setattr(network, "KEEPALIVE_TIME_S", 0.3)
    monkeypatch.setattr(network, "KEEPALIVE_TIMEOUT_S", 1.5)
    core = FakeCore(paused=True)

    async def test():
        async with (
            running_server(core) as (client, port, *_),
            link_to(port) as (far_port, cut),
            GimbalClient(f"127.0.0.1:{far_port}") as far,
        ):
            lost, kept = (asyncio.create_task(collect(each, max_tokens=1)) for each in (far, client))
            await until(lambda: len(core.live) == 2)
            await asyncio.sleep(2)  # longer than both times: a client that answers pings is kept
            assert len(core.live) == 2
            cut.set()
            await until(lambda: len(core.live) == 1)
            core.paused = False
            assert (await kept)[-1].finish_reason == "length"
            lost.cancel()

    run(test, core)


@contextlib.asynccontextmanager
async def link_to(port):
    """A port that forwards to ``port``, and an event that cuts the link, unnoticed by both ends."""
    cut = asyncio.Event()
    pumps: list[asyncio.Task[None]] = []

    async def pump(reader, writer):
        while data := await reader.read(2**16):
            if not cut.is_set():
                writer.write(data)

    async def forward(reader, writer):
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        pumps.extend(asyncio.create_task(pump(*ends)) for ends in ((reader, far_writer), (far_reader, writer)))

    link = await asyncio.start_server(forward, "127.0.0.1", 0)
    try:
        yield link.sockets[0].getsockname()[1], cut
    finally:
        for task in pumps:
            task.cancel()
        link.close()


def test_silent_connections_are_closed_and_block_no_other(monkeypatch):
    monkeypatch.setattr(network, "HANDSHAKE_S", 2.0)
    core = FakeCore()

    async def test():
        async with running_server(core) as (client, port, *_):
            silent = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(50)]
            silent[0].sendall(b"PRI * HTTP/2.0")  # the start of a greeting, and no more
            assert (await collect(client, max_tokens=1))[-1].finish_reason == "length"
            for connection in silent:
                with connection:
                    while await asyncio.to_thread(connection.recv, 1024):
                        pass  # its own greeting; then it closes

    run(test, core)


def test_observers_get_every_record_and_each_logs_one_failure(caplog):
    core = FakeCore()
    records: list[RequestRecord] = []

    def fails(record):
        raise OSError("disk full")

    async def test():
        async with running_server(core, observers=[fails, records.append]) as (client, *_):
            for _ in range(3):
                assert (await collect(client, max_tokens=1))[-1].finish_reason == "length"

    run(test, core)
    assert [(record.outcome, record.origin.client) for record in records] == [("length", "127.0.0.1")] * 3
    assert [record.exc_info[1].args for record in caplog.records] == [("disk full",)]


def test_operators_http_is_ready_when_health_is():
    core = FakeCore(state="warming", paused=True)

    def get(port, path):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    async def test():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]

        async def fetch(path):
            return await asyncio.to_thread(get, port, path)

        async with running_server(core, operators=("127.0.0.1", port)) as (client, _, stop, task):
            assert [(await fetch(path))[0] for path in ("/ready", "/health")] == [503, 200]
            core.state = "serving"
            assert (await fetch("/ready"))[0] == 200
            stream = asyncio.create_task(collect(client, max_tokens=2))
            await until(lambda: core.live)
            core.step()
            core.step()
            await stream
            assert (await fetch("/dashboard"))[0] == 200
            assert json.loads((await fetch("/dashboard/data"))[1])
            metrics = (await fetch("/metrics"))[1]
            assert "gimbal_generation_tokens_total 2.0" in metrics
            assert "gimbal_e2e_request_latency_seconds_count 1.0" in metrics
            stream = asyncio.create_task(collect(client, max_tokens=1))
            await until(lambda: core.live)
            stop.set()
            assert [(await fetch(path))[0] for path in ("/ready", "/health")] == [503, 200]
            core.step()
            await stream
            await task

    run(test, core)


class FakeGateway(Gateway):
    """Starts nothing, and keeps the port that is for it."""

    def __init__(self, failure=None):
        self.ready, self.ended, self.port, self.failure = False, False, 0, failure

    async def run(self, grpc_port):
        self.port = grpc_port
        try:
            if self.failure is not None:
                raise self.failure
            await asyncio.Event().wait()
        finally:
            self.ended = True


KEYS_NEEDED = "right-key-0123456789 alice"


def test_the_gateway_has_its_own_port_without_key_or_limit(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text(KEYS_NEEDED)
    core, gateway = FakeCore(paused=True), FakeGateway()
    records: list[RequestRecord] = []
    asked: list[tuple[str, int]] = []

    def is_own(peer, port):
        asked.append((peer.rpartition(":")[0], port))
        return True

    monkeypatch.setattr(grpc_server, "is_own_peer", is_own)
    network = NetworkConfig(port=0, api_keys=tmp_path / "keys", max_streams_per_client=1)

    async def test():
        async with running_server(core, network=network, gateway=gateway, observers=[records.append]) as (client, *_):
            assert not await client.is_serving()
            gateway.ready = True
            while not await client.is_serving():
                await asyncio.sleep(0.01)
            with pytest.raises(ClientError, match="no API key"):
                await collect(client)
            async with GimbalClient(f"127.0.0.1:{gateway.port}") as own:
                streams = [asyncio.create_task(collect(own, max_tokens=1)) for _ in range(3)]
                await until(lambda: len(core.live) == 3)
                assert (await own.engine.GetModelInfo(pb.GetModelInfoRequest())).served_model_name == "fake"
                with pytest.raises(ClientError, match="Method not found"):
                    await own.status()  # it needs no other service
                core.paused = False
                await asyncio.gather(*streams)
            assert not gateway.ended
        assert gateway.ended

    run(test, core)
    assert [record.origin.client for record in records] == ["gateway"] * 3
    assert asked == [("ipv4:127.0.0.1", gateway.port)]  # once for the connection, not for each call


def test_the_gateway_starts_after_warm_up():
    core, gateway = FakeCore(state="warming"), FakeGateway()

    async def test():
        async with running_server(core, gateway=gateway):
            await asyncio.sleep(0.15)
            assert not gateway.port
            core.state = "serving"
            await until(lambda: gateway.port)

    run(test, core)


def test_the_port_of_the_gateway_rejects_other_processes(monkeypatch):
    monkeypatch.setattr(grpc_server, "is_own_peer", lambda peer, port: False)
    core, gateway = FakeCore(), FakeGateway()

    async def test():
        async with running_server(core, gateway=gateway):
            await until(lambda: gateway.port)
            await rejected_by(gateway.port)

    async def rejected_by(port):
        async with GimbalClient(f"127.0.0.1:{port}") as other:
            for call in (collect(other), other.tokenizer(), other.engine.GetModelInfo(pb.GetModelInfoRequest())):
                with pytest.raises((ClientError, grpc.aio.AioRpcError), match="own gateway"):
                    await call

    run(test, core)


def test_a_failing_gateway_ends_the_server():
    core, gateway = FakeCore(), FakeGateway(OSError("no smg"))

    async def test():
        with pytest.raises(OSError, match="no smg"):
            await serve(core, NO_FILES, NetworkConfig(port=0), asyncio.Event(), gateway=gateway)

    run(test, core)


def test_two_servers_do_not_share_a_port():
    core = FakeCore()

    async def test():
        async with running_server(core) as (_, port, *_):
            with pytest.raises(OSError, match=f"127.0.0.1:{port}: the port is taken"):
                await serve(core, NO_FILES, NetworkConfig(port=port), asyncio.Event())

    run(test, core)


def test_many_streams_and_cancellations_leave_nothing():
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
