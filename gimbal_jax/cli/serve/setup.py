"""The devices of ``gimbal serve``, made alike in every process: checked, loaded, compiled."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gimbal_jax.cli.serve.options import ServeOptions
from gimbal_jax.cli.terminal import console, progress_bar
from gimbal_jax.config import ModelConfig, ServerConfig
from gimbal_jax.serving.runtime.devices import load_on_mesh
from gimbal_jax.serving.runtime.host_memory import (
    give_back_freed_memory,
    host_memory,
    reuse_freed_memory,
    use_huge_pages,
)

if TYPE_CHECKING:
    import jax

    from gimbal_jax.serving.runtime.commands import Followers
    from gimbal_jax.serving.runtime.device_runner import DeviceRunner
    from gimbal_jax.serving.runtime.programs import ProgramCache


@dataclass(frozen=True)
class Checkpoint:
    """The model to serve."""

    folder: Path
    name: str
    """For clients."""
    config: ModelConfig
    """With the type that weights get on these devices."""


def check_servable(
    checkpoint: Checkpoint, config: ServerConfig, options: ServeOptions, devices: list[jax.Device]
) -> None:
    """Refuse, before the weights are read, what these devices cannot serve; raises ValueError."""
    from gimbal_jax.model.orbax_checkpoint import check_target
    from gimbal_jax.model.sharding import check_mesh
    from gimbal_jax.model.step import check_kernels
    from gimbal_jax.pallas_kernels import backend_of
    from gimbal_jax.serving.engine.limits import check_limits
    from gimbal_jax.serving.runtime.batch import step_buckets

    model = checkpoint.config
    if options.save is not None:
        check_target(options.save)
    check_mesh(model, config.mesh)
    check_limits(config.engine)
    step_buckets(config.engine, config.mesh.tp)
    check_kernels(model, config.engine, config.mesh.tp, model.dtype, backend_of(devices[0]))


def with_kv_pool(model: ModelConfig, config: ServerConfig, options: ServeOptions) -> ServerConfig:
    """With as many KV pages as the devices hold, unless the user says; raises ValueError where that is none."""
    import jax

    from gimbal_jax.serving.runtime.kv_pool import size_kv_pool

    if options.num_pages is not None:
        return config
    moves_at_start = options.placement_file is not None or options.placement_state is not None
    config, said = size_kv_pool(model, config, jax.local_devices()[0], start_placement=moves_at_start)
    console.print(said)
    return config


def load_runner(
    checkpoint: Checkpoint,
    config: ServerConfig,
    options: ServeOptions,
    devices: list[jax.Device],
    followers: Followers | None = None,
) -> DeviceRunner:
    """Read the weights; the runner is not warm yet."""
    from gimbal_jax.serving.runtime.device_runner import DeviceRunner

    model = checkpoint.config
    programs = program_cache(options.compile_cache, model, config, devices)
    if programs is not None:
        programs.read_ahead()
    with progress_bar("loading") as progress:
        weights, slots, mesh = load_on_mesh(
            checkpoint.folder, model, config.mesh, devices, model.weights_dtype, progress
        )
    return DeviceRunner(model, config, mesh, weights, slots, model.dtype, programs, followers)


def warm_up(runner: DeviceRunner, check: Callable[[], None] = lambda: None) -> None:
    """Compile everything; what ``check`` raises between two programs ends it."""
    with progress_bar("compiling") as progress:

        def on_progress(done: int, total: int) -> None:
            check()
            progress(done, total)

        runner.warm_up(on_progress)
    give_back_freed_memory()
    reuse_freed_memory()
    gc.collect()
    gc.freeze()  # what is here now stays: looking through all of it again and again would stop ticks


def gather_pages(runner: DeviceRunner) -> None:
    """Put the weights on huge pages, beside the first steps. Those that move meanwhile leave their places,
    which harms nothing."""
    threading.Thread(target=use_huge_pages, args=[_places_on_host(runner.weights)], daemon=True).start()


def program_cache(
    folder: str, model: ModelConfig, config: ServerConfig, devices: list[jax.Device]
) -> ProgramCache | None:
    """Where compiled programs are kept; None if they are not."""
    from gimbal_jax.serving.runtime.programs import ProgramCache, programs_key

    if folder == "off":
        return None
    try:
        programs = Path(folder).expanduser() / "programs"
    except RuntimeError as error:  # there is no home
        console.print(f"compiled programs are not kept: --compile-cache {folder}: {error}")
        return None
    mesh_devices = devices[: config.mesh.ranks]
    return ProgramCache(programs, programs_key(model, config, model.dtype, mesh_devices), mesh_devices, console.print)


def peak_memory() -> str:
    """In words; none where the system does not say."""
    try:
        return f"; peak memory {host_memory().peak / 2**30:.1f} GiB"
    except OSError:
        return ""


def _places_on_host(weights: Any) -> list[tuple[int, int]]:
    """Address and bytes of the weights that CPU devices hold; every step reads through them."""
    import jax

    shards = [shard for array in jax.tree.leaves(weights) for shard in array.addressable_shards]
    return [
        (shard.data.unsafe_buffer_pointer(), shard.data.nbytes) for shard in shards if shard.device.platform == "cpu"
    ]
