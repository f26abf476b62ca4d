"""The ``gimbal serve`` command: from its options to a server that has drained."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from gimbal_jax.cli.serve.group import end_process, ends_at_once, follow, gather
from gimbal_jax.cli.serve.options import DEFAULT_MODEL_LEN, ServeOptions
from gimbal_jax.cli.serve.processes import Processes, join_processes, nodes_of
from gimbal_jax.cli.serve.setup import (
    Checkpoint,
    check_servable,
    gather_pages,
    load_runner,
    peak_memory,
    warm_up,
    with_kv_pool,
)
from gimbal_jax.cli.serve.toml_file import takes_serve_options
from gimbal_jax.cli.terminal import console, errors_said, progress_bar
from gimbal_jax.config import (
    GPU_ENGINE,
    EngineConfig,
    MeshConfig,
    ModelConfig,
    NetworkConfig,
    ServerConfig,
)
from gimbal_jax.serving.runtime.devices import set_up_devices

if TYPE_CHECKING:
    import jax

    from gimbal_jax.serving.core.core import EngineCore
    from gimbal_jax.serving.frontend.record import RequestRecord
    from gimbal_jax.serving.gateway.config import GatewayConfig


@takes_serve_options
def serve(options: ServeOptions) -> None:
    """Serve MODEL over gRPC, and over OpenAI's HTTP API with --http-port."""
    from gimbal_jax.model.hub import check_name

    if options.model is None:
        raise typer.BadParameter("give a folder or a hub id, here or as `model` in --config", param_hint="MODEL")
    # Until there is a server to drain: a container's first process ignores signals that it has no handler for.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with errors_said():
        processes = join_processes(options)
    with ends_at_once(processes), errors_said():
        check_name(options.model)
        mesh = MeshConfig(options.dp, options.tp)
        devices = set_up_devices(options.devices, mesh, options.memory_utilisation)
        checkpoint = find_checkpoint(options, on_cpu=devices[0].platform == "cpu")
        config = server_config(options, checkpoint.config, on_gpu=devices[0].platform == "gpu")
        if processes is None or processes.leads:
            code = asyncio.run(serve_checkpoint(checkpoint, config, options, devices, processes))
        else:
            code = follow(processes, checkpoint, config, options, devices)
    raise typer.Exit(code)


def find_checkpoint(options: ServeOptions, *, on_cpu: bool) -> Checkpoint:
    """The folder or hub id of the options; raises ValueError where it is none, or not a model that we serve."""
    from gimbal_jax.model.hf_config import load_config
    from gimbal_jax.model.loading import weights_dtype_on_cpu

    assert options.model is not None
    folder = fetch_checkpoint(options.model, options.revision)
    config = load_config(folder)
    dtype = options.dtype if options.dtype != "auto" else "float32" if on_cpu else config.dtype
    name = options.served_model_name or (folder.resolve().name if Path(options.model).is_dir() else options.model)
    weights_dtype = weights_dtype_on_cpu(folder, dtype) if on_cpu else dtype
    return Checkpoint(folder, name, replace(config, dtype=dtype, weights_dtype=weights_dtype))


def fetch_checkpoint(model: str, revision: str | None) -> Path:
    """Folder of a checkpoint, fetched from the hub if it is no folder; raises ValueError or OSError."""
    from gimbal_jax.model.hub import resolve_model

    if Path(model).is_dir():
        return resolve_model(model, revision)  # at once, without a progress bar
    with progress_bar("fetching") as progress:
        return resolve_model(model, revision, progress)


def server_config(options: ServeOptions, model: ModelConfig, *, on_gpu: bool) -> ServerConfig:
    """Limits that the user left open are those of the kind of device; raises ValueError for one that cannot be."""
    if options.max_model_len and options.max_model_len > model.max_position:
        raise ValueError(
            f"--max-model-len {options.max_model_len} is beyond the model's {model.max_position} positions"
        )
    names = ("page_size", "num_pages", "max_rows", "token_budget", "tile")
    return ServerConfig(
        MeshConfig(options.dp, options.tp),
        replace(
            GPU_ENGINE if on_gpu else EngineConfig(),
            max_model_len=min(model.max_position, options.max_model_len or DEFAULT_MODEL_LEN),
            max_queue=options.max_queue,
            prefix_cache=options.prefix_cache == "on",
            exchange=options.exchange,
            **{name: value for name in names if (value := getattr(options, name)) is not None},
        ),
        options.dispatch,
        options.queue,
        options.placement,
    )


def network_config(options: ServeOptions) -> NetworkConfig:
    """The fields of the same names."""
    names = (field.name for field in dataclasses.fields(NetworkConfig))
    return NetworkConfig(**{name: getattr(options, name) for name in names})


def gateway_config(options: ServeOptions, folder: Path, config: ServerConfig) -> GatewayConfig | None:
    """None without --http-port. Raises ValueError where HTTP would let in whom gRPC does not."""
    from gimbal_jax.serving.gateway.config import GatewayConfig, load_http_keys

    if options.http_port is None:
        return None
    if options.http_api_key_file is None and (options.api_keys or options.tls_client_ca):
        raise ValueError("--http-port with --api-keys or --tls-client-ca needs --http-api-key-file: HTTP would be open")
    traces = options.otlp_traces_endpoint or ""
    return GatewayConfig(
        model=folder.resolve(),
        port=options.http_port,
        host=options.http_host,
        keys=load_http_keys(options.http_api_key_file) if options.http_api_key_file else (),
        cors_origins=options.cors_origin,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        max_payload_mib=options.max_message_mib,
        # What the engines can hold: they would refuse more.
        max_requests=config.mesh.dp * (config.engine.max_rows + config.engine.max_queue),
        # smg sends spans in plain text only, and wants the address without http://.
        traces_endpoint=traces.removeprefix("http://") if traces.startswith("http://") else None,
    )


async def serve_checkpoint(
    checkpoint: Checkpoint,
    config: ServerConfig,
    options: ServeOptions,
    devices: list[jax.Device],
    processes: Processes | None = None,
) -> int:
    """Load, warm up, serve until SIGTERM or SIGINT, drain; returns the exit code. Of many processes this one leads."""
    from gimbal_jax.model.orbax_checkpoint import save_orbax
    from gimbal_jax.scheduler.counts_file import load_placement_of
    from gimbal_jax.serving.core.core import EngineCore
    from gimbal_jax.serving.gateway.config import check_gateway
    from gimbal_jax.serving.gateway.gateway import Gateway
    from gimbal_jax.serving.placement.files import CountsDump, PlacementState
    from gimbal_jax.serving.placement.process import PlacementProcess
    from gimbal_jax.serving.placement.rebalance import Rebalancer, apply_placement
    from gimbal_jax.serving.rpc.listen import check_network
    from gimbal_jax.serving.rpc.model_files import load_model_files
    from gimbal_jax.serving.rpc.server import serve as serve_grpc
    from gimbal_jax.serving.runtime.commands import Stop

    # Everything that can be refused is refused before the weights are read.
    model, network = checkpoint.config, network_config(options)
    check_network(network)
    check_servable(checkpoint, config, options, devices)
    start_LE = load_placement_of(options.placement_file, model, config.mesh) if options.placement_file else None
    kept = None
    if options.placement_state is not None:
        kept = PlacementState(options.placement_state, model, config.mesh)
        start_LE = kept.found_LE if kept.found_LE is not None else start_LE
    files = load_model_files(checkpoint.folder, checkpoint.name)
    dump = None
    if options.dump_counts is not None:
        meta = {"model": checkpoint.folder.name, "policy": config.placement.policy, "ranks": config.mesh.ranks}
        dump = CountsDump(options.dump_counts, time.strftime("%Y%m%d-%H%M%S"), meta)
    profiler = None
    if options.profile_dir is not None:
        from gimbal_jax.serving.runtime.profiler import Profiler

        profiler = Profiler(options.profile_dir)
    gateway = None
    if (http := gateway_config(options, checkpoint.folder, config)) is not None:
        check_gateway(http)
        gateway = Gateway(http, console.print)
    with contextlib.ExitStack() as stack:
        observers = _observers(options, checkpoint.name, stack)
        config = with_kv_pool(model, config, options)
        group = None
        if processes is not None:
            group = stack.enter_context(gather(processes, checkpoint, config, options))
        runner = load_runner(checkpoint, config, options, devices, group)
        if group is not None:
            mesh = replace(config.mesh, nodes=nodes_of(group.hosts, config.mesh))
            config = replace(config, mesh=mesh)
        on_placement = None if kept is None else kept.keep
        rebalancer = Rebalancer(model, config, runner, PlacementProcess(), windows=dump, on_placement=on_placement)
        server = EngineCore(model, config, runner, rebalancer)
        if group is not None:
            group.when_lost(server.abandon)

        warm = threading.Event()

        def prepare() -> None:
            warm_up(runner, server.check_warming)
            warm.set()
            if start_LE is not None:
                apply_placement(runner, start_LE, config)
            if server.state == "warming":  # not draining already
                console.print(f"serving{peak_memory()}")
            gather_pages(runner)

        stop = asyncio.Event()
        _drain_on_signals(server, stop)
        loop = asyncio.get_running_loop()

        def started(port: int) -> None:
            console.print(f"listening on {network.host}:{port}")
            server.start(prepare, on_end=lambda: loop.call_soon_threadsafe(stop.set))

        try:
            await serve_grpc(
                server,
                files,
                network,
                stop,
                drain_timeout_s=options.drain_timeout,
                operators=None if options.operators_port is None else (options.operators_host, options.operators_port),
                observers=observers,
                gateway=gateway,
                profiler=profiler,
                started=started,
            )
        finally:
            await asyncio.to_thread(server.stop)
            for file in (dump, kept):
                if file is not None:
                    await asyncio.to_thread(file.close)
        if server.state == "failed":
            console.print(Text.assemble(("the engine failed: ", "red"), str(server.error)))
            if group is not None:
                end_process(1)
            return 1
        if group is not None:
            if not warm.is_set():
                group.leave()
            group.send(Stop(), runner.layout)
        if options.save is not None:
            with console.status("writing the checkpoint"):
                save_orbax(options.save, checkpoint.folder, runner.weights, runner.slot_of_expert_LE)
    return 0


def _drain_on_signals(server: EngineCore, stop: asyncio.Event) -> None:
    """The first signal drains; a second one ends the process as if nothing heeded it."""
    loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)

    def drain() -> None:
        console.print("draining")
        for number in numbers:
            loop.remove_signal_handler(number)
        server.drain()
        stop.set()

    for number in numbers:
        loop.add_signal_handler(number, drain)


def _observers(options: ServeOptions, name: str, stack: contextlib.ExitStack) -> list[Callable[[RequestRecord], None]]:
    """Who hears of requests that ended; the stack closes them."""
    observers: list[Callable[[RequestRecord], None]] = []
    if options.log_format != "off":
        from gimbal_jax.serving.monitoring.request_log import RequestLog

        log = RequestLog(sys.stdout, options.log_format, time.time)
        observers.append(stack.enter_context(contextlib.closing(log)))
    if options.otlp_traces_endpoint is not None:
        from gimbal_jax.serving.monitoring.tracing import tracer

        try:
            spans = tracer(options.otlp_traces_endpoint, name)
        except ImportError as error:
            raise ValueError(f"--otlp-traces-endpoint: {error}") from error
        observers.append(stack.enter_context(contextlib.closing(spans)))
    return observers
