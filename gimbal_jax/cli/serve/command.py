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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from gimbal_jax.cli.serve.group import end_process, exit_on_error, follow, gather
from gimbal_jax.cli.serve.options import DEFAULT_MODEL_LEN, ServeOptions
from gimbal_jax.cli.serve.processes import Processes, join_processes, nodes_of
from gimbal_jax.cli.serve.setup import (
    Checkpoint,
    check_servable,
    find_checkpoint,
    load_runner,
    peak_memory,
    use_huge_pages_for_weights,
    warm_up,
    with_kv_pool,
)
from gimbal_jax.cli.serve.toml_file import takes_serve_options
from gimbal_jax.cli.terminal import console, report_errors
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
    import numpy as np

    from gimbal_jax.serving.core.core import EngineCore
    from gimbal_jax.serving.frontend.record import RequestRecord
    from gimbal_jax.serving.gateway.config import GatewayConfig
    from gimbal_jax.serving.gateway.gateway import Gateway
    from gimbal_jax.serving.placement.files import CountsDump, PlacementState
    from gimbal_jax.serving.rpc.model_files import ModelFiles
    from gimbal_jax.serving.runtime.device_runner import DeviceRunner
    from gimbal_jax.serving.runtime.profiler import Profiler


@takes_serve_options
def serve(options: ServeOptions) -> None:
    """Serve MODEL over gRPC, and over OpenAI's HTTP API with --http-port."""
    from gimbal_jax.model.hub import check_name

    if options.model is None:
        raise typer.BadParameter("give a folder or a hub id, here or as `model` in --config", param_hint="MODEL")
    # The first process of a container ignores signals without a handler. Until there is a server to drain, SIGTERM
    # ends the command as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with report_errors():
        processes = join_processes(options)
    with exit_on_error(processes), report_errors():
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


def server_config(options: ServeOptions, model: ModelConfig, *, on_gpu: bool) -> ServerConfig:
    """Return the limits of the server. Limits that the user left open depend on the kind of device.

    Raise ValueError if the model cannot have the given length.
    """
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
    """Return the options that have the names of fields of ``NetworkConfig``."""
    names = (field.name for field in dataclasses.fields(NetworkConfig))
    return NetworkConfig(**{name: getattr(options, name) for name in names})


def gateway_config(options: ServeOptions, folder: Path, config: ServerConfig) -> GatewayConfig | None:
    """Return the settings of the HTTP gateway, None without --http-port.

    Raise ValueError if HTTP would admit clients that gRPC rejects.
    """
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
        # The engines reject more requests than they can hold.
        max_requests=config.mesh.dp * (config.engine.max_rows + config.engine.max_queue),
        # smg sends spans in plain text only, to an address without http://.
        traces_endpoint=traces.removeprefix("http://") if traces.startswith("http://") else None,
    )


@dataclass(frozen=True, eq=False)
class Inputs:
    """Files and settings that a server reads and opens before its weights."""

    model_files: ModelFiles
    start_LE: np.ndarray | None
    """Slot of each expert at the start; None for the checkpoint's own placement."""
    state: PlacementState | None
    """File that keeps the placement for the next start."""
    windows: CountsDump | None
    """Files of traffic windows."""
    profiler: Profiler | None
    gateway: Gateway | None

    def close(self) -> None:
        for file in (self.windows, self.state):
            if file is not None:
                file.close()


def read_inputs(checkpoint: Checkpoint, config: ServerConfig, options: ServeOptions) -> Inputs:
    """Read and open the files that the options name. Raise ValueError or OSError that names the bad one."""
    from gimbal_jax.scheduler.counts_file import load_placement_of
    from gimbal_jax.serving.gateway.config import check_gateway
    from gimbal_jax.serving.gateway.gateway import Gateway
    from gimbal_jax.serving.placement.files import CountsDump, PlacementState
    from gimbal_jax.serving.rpc.model_files import load_model_files
    from gimbal_jax.serving.runtime.profiler import Profiler

    model, mesh = checkpoint.config, config.mesh
    start_LE = load_placement_of(options.placement_file, model, mesh) if options.placement_file else None
    state = PlacementState(options.placement_state, model, mesh) if options.placement_state else None
    if state is not None and state.found_LE is not None:
        start_LE = state.found_LE  # newer than the file that the first start was given
    model_files = load_model_files(checkpoint.folder, checkpoint.name)
    windows = None
    if options.dump_counts is not None:
        meta = {"model": checkpoint.folder.name, "policy": config.placement.policy, "ranks": mesh.ranks}
        windows = CountsDump(options.dump_counts, time.strftime("%Y%m%d-%H%M%S"), meta)
    profiler = Profiler(options.profile_dir) if options.profile_dir else None
    gateway = None
    if (http := gateway_config(options, checkpoint.folder, config)) is not None:
        check_gateway(http)
        gateway = Gateway(http, console.print)
    return Inputs(model_files, start_LE, state, windows, profiler, gateway)


async def serve_checkpoint(
    checkpoint: Checkpoint,
    config: ServerConfig,
    options: ServeOptions,
    devices: list[jax.Device],
    processes: Processes | None = None,
) -> int:
    """Load, warm up, serve until SIGTERM or SIGINT, then drain. Return the exit code.

    With several ``processes`` this one leads the others.
    """
    from gimbal_jax.model.orbax_checkpoint import save_orbax
    from gimbal_jax.serving.core.core import EngineCore
    from gimbal_jax.serving.placement.process import PlacementProcess
    from gimbal_jax.serving.placement.rebalance import Rebalancer
    from gimbal_jax.serving.rpc.listen import check_network
    from gimbal_jax.serving.runtime.commands import Stop

    # Every error of the user is reported before the weights are read.
    model = checkpoint.config
    check_network(network_config(options))
    check_servable(checkpoint, config, options, devices)
    inputs = read_inputs(checkpoint, config, options)
    with contextlib.ExitStack() as stack:
        observers = _observers(options, checkpoint.name, stack)
        config = with_kv_pool(model, config, options)
        followers = None
        if processes is not None:
            followers = stack.enter_context(gather(processes, checkpoint, config, options))
        runner = load_runner(checkpoint, config, options, devices, followers)
        if followers is not None:
            config = replace(config, mesh=replace(config.mesh, nodes=nodes_of(followers.hosts, config.mesh)))
        on_placement = None if inputs.state is None else inputs.state.keep
        rebalancer = Rebalancer(
            model, config, runner, PlacementProcess(), windows=inputs.windows, on_placement=on_placement
        )
        core = EngineCore(model, config, runner, rebalancer)
        if followers is not None:
            followers.when_lost(core.abandon)
        try:
            is_warm = await _serve(core, runner, inputs, options, observers)
        finally:
            await asyncio.to_thread(core.stop)
            await asyncio.to_thread(inputs.close)
        if core.state == "failed":
            console.print(Text.assemble(("the engine failed: ", "red"), str(core.error)))
            if followers is not None:
                end_process(1)
            return 1
        if followers is not None:
            if not is_warm:
                followers.leave()
            followers.send(Stop(), runner.layout)
        if options.save is not None:
            with console.status("writing the checkpoint"):
                save_orbax(options.save, checkpoint.folder, runner.weights, runner.slot_of_expert_LE)
    return 0


async def _serve(
    core: EngineCore,
    runner: DeviceRunner,
    inputs: Inputs,
    options: ServeOptions,
    observers: list[Callable[[RequestRecord], None]],
) -> bool:
    """Listen, warm up on the engine thread, and serve until a signal. Return whether the warm-up was complete."""
    from gimbal_jax.serving.placement.rebalance import apply_placement
    from gimbal_jax.serving.rpc.server import serve as serve_grpc

    is_warm = threading.Event()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    network = network_config(options)

    def prepare() -> None:
        warm_up(runner, core.check_warming)
        is_warm.set()
        if inputs.start_LE is not None:
            apply_placement(runner, inputs.start_LE, core.config)
        if core.state == "warming":  # a signal may have begun the drain
            console.print(f"serving{peak_memory()}")
        use_huge_pages_for_weights(runner)

    def started(port: int) -> None:
        console.print(f"listening on {network.host}:{port}")
        core.start(prepare, on_end=lambda: loop.call_soon_threadsafe(stop.set))

    _drain_on_signals(core, stop)
    await serve_grpc(
        core,
        inputs.model_files,
        network,
        stop,
        drain_timeout_s=options.drain_timeout,
        operators=None if options.operators_port is None else (options.operators_host, options.operators_port),
        observers=observers,
        gateway=inputs.gateway,
        profiler=inputs.profiler,
        started=started,
    )
    return is_warm.is_set()


def _drain_on_signals(core: EngineCore, stop: asyncio.Event) -> None:
    """Drain at the first signal. A second one ends the process, because its handlers are gone by then."""
    loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)

    def drain() -> None:
        console.print("draining")
        for number in numbers:
            loop.remove_signal_handler(number)
        core.drain()
        stop.set()

    for number in numbers:
        loop.add_signal_handler(number, drain)


def _observers(options: ServeOptions, name: str, stack: contextlib.ExitStack) -> list[Callable[[RequestRecord], None]]:
    """Return the functions that get the record of every ended request. The stack closes what they write to."""
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
