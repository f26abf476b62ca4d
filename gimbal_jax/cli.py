"""The ``gimbal`` command."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from rich.console import Console
from rich.text import Text

from gimbal_jax.config import (
    GPU_ENGINE,
    MEMORY_UTILISATION,
    DispatchConfig,
    DispatchPolicy,
    EngineConfig,
    Exchange,
    LoadTerm,
    MeshConfig,
    ModelConfig,
    OfflinePolicy,
    PlacementConfig,
    PlacementPolicy,
    QueueConfig,
    QueuePolicy,
    ServerConfig,
)
from gimbal_jax.mesh_cli import mesh_app
from gimbal_jax.simulate_cli import simulate
from gimbal_jax.terminal import console, errors_said, fail, progress_bar

if TYPE_CHECKING:
    import jax

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Serve Qwen3-MoE models in JAX."
)
app.add_typer(mesh_app, name="mesh")
app.command()(simulate)

Model = Annotated[Path, typer.Argument(help="Checkpoint folder: Hugging Face safetensors, or Orbax from `convert`.")]
Devices = Annotated[str, typer.Option(help="`auto`, `gpu`, `cpu`, or `cpu:N` for N virtual CPU devices.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"],
    typer.Option(help="Type of weights and KV cache; auto is float32 on CPU and the checkpoint's own elsewhere."),
]
DEFAULT_MODEL_LEN = 4096
ALL_POLICIES: tuple[PlacementPolicy | OfflinePolicy, ...] = (*get_args(PlacementPolicy), *get_args(OfflinePolicy))


def _by_device(limit: str) -> str:
    """What an engine's limit is where the user says nothing."""
    return f"default {getattr(EngineConfig, limit)} on CPU, {getattr(GPU_ENGINE, limit)} on GPU"


@app.command()
def serve(
    model: Model,
    dp: Annotated[int, typer.Option(min=1, help="DP engines.")] = 1,
    tp: Annotated[int, typer.Option(min=1, help="Devices of each engine; experts are spread over all dp * tp.")] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port; 0 takes a free one.")] = 50051,
    metrics_port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port for Prometheus on loopback.")] = None,
    devices: Devices = "auto",
    dtype: Dtype = "auto",
    dispatch: Annotated[DispatchPolicy, typer.Option(help="Which engine gets a request.")] = DispatchConfig.policy,
    queue: Annotated[QueuePolicy, typer.Option(help="Which request an engine runs first.")] = QueueConfig.policy,
    placement: Annotated[PlacementPolicy, typer.Option(help="Which rank holds each expert.")] = PlacementConfig.policy,
    window_steps: Annotated[
        int, typer.Option(min=1, help="Steps of traffic before each placement decision.")
    ] = PlacementConfig.window_steps,
    min_gain: Annotated[
        float, typer.Option(min=0, max=1, help="Least share of the objective that a new placement must save.")
    ] = PlacementConfig.min_gain,
    smoothing: Annotated[
        float, typer.Option(min=0, max=0.99, help="Weight that earlier windows keep in a placement decision.")
    ] = PlacementConfig.smoothing,
    placement_file: Annotated[
        Path | None, typer.Option(help="Start from this .npz file's placement, or its last window's.")
    ] = None,
    dump_counts: Annotated[Path | None, typer.Option(help="Folder to write every traffic window to.")] = None,
    exchange: Annotated[Exchange, typer.Option(help="How tokens travel to experts.")] = EngineConfig.exchange,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help=f"Most tokens per sequence; default {DEFAULT_MODEL_LEN} or the model's.")
    ] = None,
    page_size: Annotated[
        int | None, typer.Option(min=1, help=f"Tokens per KV page; {_by_device('page_size')}.")
    ] = None,
    num_pages: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"KV pages per engine; default what GPU memory holds, {EngineConfig.num_pages} on CPU."
        ),
    ] = None,
    memory_utilisation: Annotated[
        float, typer.Option(min=0.1, max=1, help="Share of each GPU's memory that the server takes.")
    ] = MEMORY_UTILISATION,
    max_rows: Annotated[
        int | None, typer.Option(min=1, help=f"Most sequences per engine at once; {_by_device('max_rows')}.")
    ] = None,
    token_budget: Annotated[
        int | None, typer.Option(min=1, help=f"Most tokens per engine and step; {_by_device('token_budget')}.")
    ] = None,
    tile: Annotated[int | None, typer.Option(min=2, help=f"Tokens per prefill tile; {_by_device('tile')}.")] = None,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Most waiting requests per engine; one more is refused.")
    ] = EngineConfig.max_queue,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds that running requests get after SIGTERM.")] = 30,
    save: Annotated[
        Path | None, typer.Option(help="At the end, write an Orbax checkpoint here, with the placement learned.")
    ] = None,
    compile_cache: Annotated[Path | None, typer.Option(help="Folder that keeps compiled programs.")] = None,
) -> None:
    """Serve MODEL over gRPC (vllm.grpc.engine.VllmEngine, gimbal.v1.Control, health, reflection)."""
    with errors_said():
        available = _set_up_devices(devices, MeshConfig(dp, tp), compile_cache, memory_utilisation)
        from gimbal_jax.model.hf_config import load_config

        config = load_config(model)
        limit = min(config.max_position, max_model_len or DEFAULT_MODEL_LEN)
        if max_model_len and max_model_len > config.max_position:
            raise ValueError(f"--max-model-len {max_model_len} is beyond the model's {config.max_position} positions")
        limits = {
            "page_size": page_size,
            "num_pages": num_pages,
            "max_rows": max_rows,
            "token_budget": token_budget,
            "tile": tile,
        }
        settings = ServerConfig(
            MeshConfig(dp, tp),
            replace(
                GPU_ENGINE if available[0].platform == "gpu" else EngineConfig(),
                max_model_len=limit,
                max_queue=max_queue,
                exchange=exchange,
                **{name: value for name, value in limits.items() if value is not None},
            ),
            DispatchConfig(policy=dispatch),
            QueueConfig(policy=queue),
            PlacementConfig(policy=placement, window_steps=window_steps, min_gain=min_gain, smoothing=smoothing),
        )
        files = _Files(placement_file, dump_counts, save)
        address = (host, port, metrics_port)
        serving = _serve(
            model, config, settings, available, dtype, address, drain_timeout, files, size_pool=num_pages is None
        )
        code = asyncio.run(serving)
    raise typer.Exit(code)


@app.command()
def counts(
    target: Annotated[str, typer.Option(help="HOST:PORT of a server.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.npz", help="File to write.")],
    total: Annotated[bool, typer.Option("--total", help="Traffic since the start, not of the last window.")] = False,
) -> None:
    """Fetch a server's traffic counts and placement into a counts file."""
    from gimbal_jax.serving.client import GimbalClient
    from gimbal_jax.serving.client_records import ClientError

    async def fetch() -> None:
        async with GimbalClient(target) as client:
            await client.save_counts(out, "total" if total else "window")

    with errors_said():
        try:
            asyncio.run(fetch())
        except ClientError as error:
            fail(f"{target}: {error}")
    console.print(f"wrote {out}")


@dataclass(frozen=True)
class _Files:
    """What a server reads and writes beside its checkpoint."""

    placement: Path | None
    dump_counts: Path | None
    save: Path | None


@app.command()
def place(
    counts: Annotated[Path, typer.Option(help="Counts file (.npz) of a server or of your own.")],
    policy: Annotated[
        list[str],
        typer.Option(help=f"Compare this one of {', '.join(ALL_POLICIES)}; give it once for each."),
    ] = ["gimbal", "gimbal_refined", "eplb"],  # noqa: B006 never changed
    compare: Annotated[Literal["exact"] | None, typer.Option(help="Solve exactly too, and compare with it.")] = None,
    window: Annotated[int | None, typer.Option(min=0, help="Window of the file, from 0; else all together.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Compare this many layers only, evenly spaced.")] = None,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds for a layer, for the exact solver.")] = 60.0,
    alpha: Annotated[float, typer.Option(min=0, help="Weight of communication.")] = PlacementConfig.alpha,
    beta: Annotated[float, typer.Option(min=0, help="Weight of uneven load.")] = PlacementConfig.beta,
    gamma: Annotated[float, typer.Option(min=0, help="Weight of moves.")] = PlacementConfig.gamma,
    load_term: Annotated[LoadTerm, typer.Option(help="How uneven load counts.")] = PlacementConfig.load_term,
    picture: Annotated[Path, typer.Option(help="Picture to write.")] = Path("place.png"),
    save: Annotated[
        Path | None, typer.Option(help="Write the last one's placement here, for `serve --placement-file`.")
    ] = None,
) -> None:
    """Compare placement policies on counted traffic, and with the exact answer."""
    with errors_said():
        from gimbal_jax import place as placing
        from gimbal_jax.scheduler.counts_file import load_counts, save_placement
        from gimbal_jax.scheduler.placement import assign_slots

        file = load_counts(counts)
        if window is not None:
            file = placing.one_window(file, window)
        config = PlacementConfig(alpha=alpha, beta=beta, gamma=gamma, load_term=load_term)
        if unknown := sorted({*policy} - {*ALL_POLICIES}):
            raise ValueError(f"--policy {unknown[0]}: must be one of {', '.join(ALL_POLICIES)}")
        policies = sorted((name for name in ALL_POLICIES if name in policy), key=policy.index)
        everywhere = [placing.policy_answer(name, file, config) for name in ("static", *policies)]
        if save is not None:
            slot_LE = assign_slots(everywhere[-1].rank_LE, file.slot_of_expert_WLE[-1], file.ranks)
            save_placement(save, slot_LE, {"ranks": file.ranks, "policy": everywhere[-1].name})
        layer_L = placing.spaced_layers(file, layers)
        answers = [answer.of_layers(layer_L) for answer in everywhere]
        exact = None
        if compare == "exact":
            with progress_bar("solving") as progress:
                exact, solver = placing.exact_reference(answers[0].objective, time_limit, progress)
            console.print(solver)
        for table in placing.tables(answers, layer_L, exact):
            Console().print(table)
        placing.draw([*answers, *([exact] if exact else [])], layer_L, picture)
    console.print(f"wrote {picture}")


@app.command()
def demo_model(folder: Annotated[Path, typer.Argument(help="Folder to write, made if needed.")]) -> None:
    """Write a small Qwen3-MoE checkpoint with skewed routing, in Hugging Face's format."""
    from gimbal_jax.model.demo_model import write_demo_model

    with errors_said(), console.status("writing the demo model"):
        write_demo_model(folder)
    console.print(f"wrote {folder}; serve it with: gimbal serve {folder} --devices cpu:4 --dp 2 --tp 2")


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="Hugging Face checkpoint folder.")],
    target: Annotated[Path, typer.Argument(metavar="ORBAX_DIR", help="Folder to write.")],
    dp: Annotated[int, typer.Option(min=1, help="Mesh to read into, dp * tp devices.")] = 1,
    tp: Annotated[int, typer.Option(min=1, help="The result restores into any mesh.")] = 1,
    devices: Devices = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Convert a Hugging Face checkpoint to Orbax."""
    with errors_said():
        available = _set_up_devices(devices, MeshConfig(dp, tp), None)
        from gimbal_jax.model.hf_config import load_config
        from gimbal_jax.model.orbax_checkpoint import check_target, is_orbax, save_orbax
        from gimbal_jax.model.sharding import check_mesh

        if is_orbax(source):
            raise ValueError(f"{source} is an Orbax checkpoint already")
        check_target(target)
        config = load_config(source)
        check_mesh(config, MeshConfig(dp, tp))
        # Converting keeps the checkpoint's own type, also on CPU.
        wanted = config.dtype if dtype == "auto" else dtype
        weights, slots, _ = _load(source, config, MeshConfig(dp, tp), available, wanted)
        with console.status("writing the checkpoint"):
            save_orbax(target, source, weights, slots)
    console.print(f"wrote {target}")


async def _serve(
    folder: Path,
    model: ModelConfig,
    config: ServerConfig,
    devices: list[jax.Device],
    dtype: str,
    address: tuple[str, int, int | None],
    drain_timeout: float,
    paths: _Files,
    *,
    size_pool: bool = False,
) -> int:
    """Load, warm up, serve until SIGTERM or SIGINT, drain; returns the exit code.

    ``size_pool`` gives engines as many KV pages as the devices hold, in place of the configured number.
    """
    from gimbal_jax.model.orbax_checkpoint import check_target, save_orbax
    from gimbal_jax.model.sharding import check_mesh
    from gimbal_jax.model.step import check_kernels
    from gimbal_jax.pallas_kernels import backend_of
    from gimbal_jax.scheduler.counts_file import load_placement_of
    from gimbal_jax.serving.batch import step_buckets
    from gimbal_jax.serving.counts_dump import CountsDump
    from gimbal_jax.serving.device_runner import DeviceRunner
    from gimbal_jax.serving.engine import check_limits
    from gimbal_jax.serving.grpc_server import serve as serve_grpc
    from gimbal_jax.serving.kv_pool import size_kv_pool
    from gimbal_jax.serving.model_files import load_model_files
    from gimbal_jax.serving.rebalance import move_to
    from gimbal_jax.serving.server import Server

    # Everything that can be refused is refused before the weights are read.
    if paths.save is not None:
        check_target(paths.save)
    check_mesh(model, config.mesh)
    check_limits(config.engine)
    step_buckets(config.engine, config.mesh.tp)
    dtype = dtype if dtype != "auto" else "float32" if devices[0].platform == "cpu" else model.dtype
    model = replace(model, dtype=dtype)
    check_kernels(model, config.engine, config.mesh.tp, dtype, backend_of(devices[0]))
    start_LE = load_placement_of(paths.placement, model, config.mesh) if paths.placement else None
    dump = None
    if paths.dump_counts is not None:
        meta = {"model": folder.name, "policy": config.placement.policy, "ranks": config.mesh.ranks}
        dump = CountsDump(paths.dump_counts, time.strftime("%Y%m%d-%H%M%S"), meta)
    if size_pool:
        config, said = size_kv_pool(model, config, devices[0])
        console.print(said)
    weights, slots, mesh = _load(folder, model, config.mesh, devices, dtype)
    runner = DeviceRunner(model, config, mesh, weights, slots, dtype)
    server = Server(model, config, runner, dump=dump)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def drain() -> None:
        console.print("draining")
        server.drain()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain)

    def warm_up() -> None:
        with progress_bar("compiling") as progress:
            runner.warm_up(progress)
        if start_LE is not None:
            move_to(runner, start_LE, config)
        if server.state == "warming":  # not draining already
            console.print("serving")

    def ended() -> None:
        loop.call_soon_threadsafe(stop.set)

    def started(port: int) -> None:
        console.print(f"listening on {address[0]}:{port}")
        server.start(warm_up, on_end=ended)

    host, port, metrics_port = address
    files = load_model_files(folder)
    try:
        await serve_grpc(
            server, files, host, port, stop, drain_timeout_s=drain_timeout, metrics_port=metrics_port, started=started
        )
    finally:
        await asyncio.to_thread(server.stop)
    if server.state == "failed":
        console.print(Text.assemble(("the engine failed: ", "red"), str(server.error)))
        return 1
    if paths.save is not None:
        with console.status("writing the checkpoint"):
            save_orbax(paths.save, folder, runner.weights, runner.slot_of_expert_LE)
    return 0


def _load(
    folder: Path, model: ModelConfig, mesh_config: MeshConfig, devices: list[jax.Device], dtype: str
) -> tuple[Any, Any, jax.sharding.Mesh]:
    """(weights, slot_of_expert_LE, mesh) with a progress bar."""
    from gimbal_jax.model.loading import load_weights
    from gimbal_jax.model.sharding import make_mesh

    mesh = make_mesh(mesh_config, devices)
    with progress_bar("loading") as progress:
        return *load_weights(folder, model, mesh, dtype, progress), mesh


def _set_up_devices(
    devices: str, mesh: MeshConfig, compile_cache: Path | None, memory_utilisation: float = MEMORY_UTILISATION
) -> list[jax.Device]:
    """Choose jax's devices, enough for the mesh, and their memory; must come before anything else uses jax."""
    import jax

    platform, _, count = devices.partition(":")
    if platform not in ("auto", "gpu", "cpu") or (count and (platform != "cpu" or not count.isdigit())):
        raise ValueError(f"--devices {devices}: must be auto, gpu, cpu or cpu:N")
    if platform != "auto":
        jax.config.update("jax_platforms", {"gpu": "cuda", "cpu": "cpu"}[platform])
    if count:
        jax.config.update("jax_num_cpu_devices", int(count))
    # Only GPUs heed this. jax takes their memory at once when it starts, and would take a share of its own choice.
    jax.config.update("jax_pjrt_client_create_options", {"memory_fraction": memory_utilisation})
    if compile_cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(compile_cache.absolute()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    try:
        available = jax.devices()
    except (RuntimeError, AssertionError) as error:  # without a plugin for the platform jax asserts
        raise ValueError(f"--devices {devices}: jax finds none of them") from error
    if len(available) < mesh.ranks:
        wanted = f"dp * tp = {mesh.ranks} devices are needed and there are {len(available)} ({available[0].platform})"
        raise ValueError(f"{wanted}; for virtual CPU devices: --devices cpu:{mesh.ranks}")
    return available
