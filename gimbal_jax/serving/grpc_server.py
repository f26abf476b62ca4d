"""The gRPC server of one process: engine protocol, control, health and reflection, from start to drain."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto import vllm_engine_pb2_grpc

from gimbal_jax.scheduler.dispatch import Choose, choose_engine
from gimbal_jax.serving import control_service, engine_service
from gimbal_jax.serving.frontend import Core, Frontend
from gimbal_jax.serving.metrics import serve_metrics
from gimbal_jax.serving.model_files import ModelFiles
from gimbal_jax.serving.protos import control_pb2_grpc

SERVICES = (engine_service.SERVICE, control_service.SERVICE)
STATE_PERIOD_S = 0.05
"""The core's state is looked at this often."""
CLOSE_S = 1.0
"""Time for the last messages to reach clients, after every request has ended."""

OPTIONS: list[tuple[str, int]] = [
    # Two servers on one port would share it silently.
    ("grpc.so_reuseport", 0),
    # Clients with long silent calls ping to keep them: by default the server answers that with GOAWAY too_many_pings.
    ("grpc.http2.max_ping_strikes", 0),
    # Find clients that vanished, so that their requests free their pages.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


async def serve(
    core: Core,
    files: ModelFiles,
    host: str,
    port: int,
    stop: asyncio.Event,
    *,
    drain_timeout_s: float = 30.0,
    metrics_port: int | None = None,
    started: Callable[[int], None] = lambda port: None,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    new_seed: Callable[[], int] = lambda: random.getrandbits(32),
    dispatch_policy: Choose = choose_engine,
) -> None:
    """Serve until ``stop`` is set, then drain: new requests are refused, and the
    live ones have ``drain_timeout_s`` to end, after which they end with UNAVAILABLE.

    Port 0 takes a free one; ``started`` is told which. Health follows the core's
    state, so the core may still be warming up. ``clock`` must be the core's own;
    ``dispatch_policy`` may be yours, in place of the configured one.
    Raises RuntimeError where the port is taken.
    """
    server = grpc.aio.server(options=OPTIONS)
    port = server.add_insecure_port(f"{host}:{port}")
    frontend = Frontend(core, clock, dispatch_policy)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    engine = engine_service.EngineService(frontend, files, new_seed, wall_clock)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(engine, server)
    control_pb2_grpc.add_ControlServicer_to_server(control_service.ControlService(frontend), server)
    reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)

    with contextlib.ExitStack() as stack:
        stack.callback(frontend.close)
        if metrics_port is not None:
            stack.enter_context(serve_metrics(core, frontend, metrics_port))
        await _set_health(health_servicer, core.state == "serving")
        await server.start()
        started(port)
        try:
            async with asyncio.TaskGroup() as group:
                follower = group.create_task(_follow_state(core, frontend, health_servicer))
                await stop.wait()
                await health_servicer.enter_graceful_shutdown()
                frontend.refuse("the server is draining")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(frontend.idle.wait(), drain_timeout_s)
                follower.cancel()
        finally:
            frontend.end_all("the server stopped before the request ended")
            await server.stop(CLOSE_S)


async def _follow_state(core: Core, frontend: Frontend, servicer: health.aio.HealthServicer) -> None:
    """Health shows the core's state; when the core has failed, no stream waits for ever."""
    while True:
        await _set_health(servicer, core.state == "serving")
        if core.state in ("failed", "stopped"):
            frontend.end_all(f"the engine has {core.state}")
        await asyncio.sleep(STATE_PERIOD_S)


async def _set_health(servicer: health.aio.HealthServicer, serving: bool) -> None:
    status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    for service in ("", *SERVICES):
        await servicer.set(service, status)
