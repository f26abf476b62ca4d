"""The gRPC server of one process, from start to drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto import vllm_engine_pb2_grpc

from gimbal_jax.config import NetworkConfig
from gimbal_jax.protos import control_pb2_grpc
from gimbal_jax.scheduler.dispatch import Choose, choose_engine
from gimbal_jax.serving.core.core import EngineCore
from gimbal_jax.serving.frontend.frontend import Frontend
from gimbal_jax.serving.frontend.record import RequestRecord
from gimbal_jax.serving.gateway.gateway import Gateway, is_own_peer
from gimbal_jax.serving.monitoring.live import LiveView
from gimbal_jax.serving.monitoring.operators import serve_operators
from gimbal_jax.serving.monitoring.request_metrics import RequestHistograms
from gimbal_jax.serving.network.api_keys import load_keys
from gimbal_jax.serving.rpc import control_service, engine_service
from gimbal_jax.serving.rpc.interceptors import Access, OwnProcesses, WellFormed
from gimbal_jax.serving.rpc.listen import grpc_options, listen, local_options, warnings
from gimbal_jax.serving.rpc.model_files import ModelFiles
from gimbal_jax.serving.text.grammar import Constraints

SERVICES = (engine_service.SERVICE, control_service.SERVICE)
LIMITED = (f"/{engine_service.SERVICE}/Generate",)
"""Methods whose calls count as a client's streams."""
STATE_PERIOD_S = 0.05
"""Seconds between two reads of the core's state."""
CLOSE_S = 1.0
"""Seconds that the last messages have to reach clients, after every request has ended."""

_log = logging.getLogger(__name__)


async def serve(
    core: EngineCore,
    files: ModelFiles,
    network: NetworkConfig,
    stop: asyncio.Event,
    *,
    drain_timeout_s: float = 30.0,
    operators: tuple[str, int] | None = None,
    observers: Sequence[Callable[[RequestRecord], None]] = (),
    gateway: Gateway | None = None,
    profiler: engine_service.Profiler | None = None,
    started: Callable[[int], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    new_seed: Callable[[], int] = lambda: random.getrandbits(32),
    dispatch_policy: Choose = choose_engine,
) -> None:
    """Serve until ``stop`` is set, then drain.

    While it drains, new requests are rejected. Running ones have ``drain_timeout_s`` seconds to end, and then fail with
    UNAVAILABLE. If the core fails, all requests fail with UNAVAILABLE immediately, and this function returns.

    core: the engines; they may still warm up, since the health service follows their state and the gateway's.
    operators: host and port of the operators' HTTP; None for none.
    observers: functions that get the record of every sequence that ended, on the event loop.
    gateway: HTTP gateway to run meanwhile; None for none.
    profiler: profiler for clients; None rejects profiles.
    started: function that gets the port once it is open; None for none.
    clock: the core's monotonic clock, in seconds. wall_clock: Unix time, in seconds.
    new_seed: function that returns a uint32 for each request without a seed.
    dispatch_policy: a dispatch rule of your own in place of the configured one.

    Raises ValueError for invalid keys or certificates, and OSError for a port that is taken.
    """
    keys = load_keys(network.api_keys) if network.api_keys is not None else None
    access = Access(keys, LIMITED, network.max_streams_per_client, wall_clock)
    server = grpc.aio.server(interceptors=(access, WellFormed()), options=grpc_options(network))
    port = listen(server, network)
    for warning in warnings(network):
        _log.warning("%s", warning)

    listeners = [*observers]  # the operators' views follow below
    frontend = Frontend(core, clock, dispatch_policy, _notify_all(listeners))
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    constraints = None
    if files.tokenizer is not None:
        constraints = Constraints(files.tokenizer.json, core.model.vocab_size, core.model.eos_token_ids)
    engine = engine_service.EngineService(core, frontend, files, new_seed, wall_clock, constraints, profiler)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(engine, server)
    control_pb2_grpc.add_ControlServicer_to_server(control_service.ControlService(core, frontend), server)
    reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    servers = [server]

    def ready() -> bool:
        return core.state == "serving" and not stop.is_set() and (gateway is None or gateway.ready)

    with contextlib.ExitStack() as stack:
        stack.callback(frontend.close)
        if operators is not None:
            live, histograms = LiveView(frontend, files.name), RequestHistograms(core.config)
            listeners += [live.observe, histograms.observe]
            stack.enter_context(serve_operators(frontend, live, histograms, *operators, ready))
        await _set_health(health_servicer, ready())
        follow = _follow_core(core, frontend, health_servicer, ready)
        tasks = [asyncio.create_task(stop.wait()), asyncio.create_task(follow)]
        try:
            if gateway is not None:
                own_server, own_port = _server_of_gateway(engine, network, clock)
                servers.append(own_server)
                await own_server.start()
                tasks.append(asyncio.create_task(_run_gateway(gateway, own_port, core)))
            await server.start()
            if started is not None:
                started(port)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises the error of a task that failed
            await health_servicer.enter_graceful_shutdown()
            frontend.reject_new("the server is draining")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(frontend.idle.wait(), drain_timeout_s)
        finally:
            frontend.end_all("the server stopped before the request ended")
            await _end(tasks)
            await asyncio.gather(*(server.stop(CLOSE_S) for server in servers))


def _notify_all(observers: Sequence[Callable[[RequestRecord], None]]) -> Callable[[RequestRecord], None]:
    """Return a function that calls all observers. It logs the first exception of each, and ignores later ones."""
    failed = set()

    def notify(record: RequestRecord) -> None:
        for index, observe in enumerate(observers):
            try:
                observe(record)
            except Exception:
                if index not in failed:
                    _log.exception("an observer of ended requests failed; later failures of it are not logged")
                failed.add(index)

    return notify


async def _run_gateway(gateway: Gateway, port: int, core: EngineCore) -> None:
    """Run the gateway after warm-up. A gateway that finds its server unhealthy would not ask again for a while."""
    while core.state == "warming":
        await asyncio.sleep(STATE_PERIOD_S)
    await gateway.run(port)


def _server_of_gateway(
    engine: engine_service.EngineService, network: NetworkConfig, clock: Callable[[], float]
) -> tuple[grpc.aio.Server, int]:
    """Return a server for our own gateway, and its loopback port. The gateway cannot send a key or speak TLS."""
    access = OwnProcesses(lambda peer: is_own_peer(peer, port), clock)
    server = grpc.aio.server(interceptors=(access,), options=local_options(network))
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(engine, server)
    port = server.add_insecure_port("127.0.0.1:0")
    return server, port


async def _follow_core(
    core: EngineCore, frontend: Frontend, servicer: health.aio.HealthServicer, ready: Callable[[], bool]
) -> None:
    """Set the health service by ``ready`` until the core ends, and then end all streams."""
    while core.state not in ("failed", "stopped"):
        await _set_health(servicer, ready())
        await asyncio.sleep(STATE_PERIOD_S)
    frontend.end_all(core.error or f"the engine has {core.state}")


async def _set_health(servicer: health.aio.HealthServicer, serving: bool) -> None:
    status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    for service in ("", *SERVICES):
        await servicer.set(service, status)


async def _end(tasks: Sequence[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
