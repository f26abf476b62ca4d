"""Set-up of ``gimbal serve``, the same in every process: checkpoint, checks, weights, compiled programs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gimbal_jax.cli.serve.options import ServeOptions
from gimbal_jax.cli.terminal import console, progress_bar
from gimbal_jax.config import ModelConfig, ServerConfig
from gimbal_jax.serving.runtime.devices import load_on_mesh
from gimbal_jax.serving.runtime.host_memory import (
    host_memory,
    reuse_freed_memory,
    trim_heap,
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
    """Name of the model for clients."""
    config: ModelConfig
    """Configuration of the model, with the dtypes that it gets on these devices."""


def find_checkpoint(options: ServeOptions, *, on_cpu: bool) -> Checkpoint:
    """Return the checkpoint of the options. Raise ValueError if it is neither folder nor hub id, or is not served."""
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
    """Return the folder of a checkpoint. Download it if ``model`` is a hub id. Raise ValueError or OSError."""
    from gimbal_jax.model.hub import resolve_model

    if Path(model).is_dir():
        return resolve_model(model, revision)
    with progress_bar("fetching") as progress:
        return resolve_model(model, revision, progress)


def check_servable(
    checkpoint: Checkpoint, config: ServerConfig, options: ServeOptions, devices: list[jax.Device]
) -> None:
    """Raise ValueError if these devices cannot serve the checkpoint. No weights are read."""
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
    """Return the configuration with as many KV pages as the devices hold, unless the user gave a number.

    Raise ValueError if the devices have no room for one page.
    """
    import jax

    from gimbal_jax.serving.runtime.kv_pool import size_kv_pool

    if options.num_pages is not None:
        return config
    moves_at_start = options.placement_file is not None or options.placement_state is not None
    config, message = size_kv_pool(model, config, jax.local_devices()[0], start_placement=moves_at_start)
    console.print(message)
    return config


def load_runner(
    checkpoint: Checkpoint,
    config: ServerConfig,
    options: ServeOptions,
    devices: list[jax.Device],
    followers: Followers | None = None,
) -> DeviceRunner:
    """Read the weights. Return a runner that is not warm yet."""
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


def warm_up(runner: DeviceRunner, check: Callable[[], None] | None = None) -> None:
    """Compile all programs. ``check`` is called between two of them, and ends the warm-up by an exception."""
    with progress_bar("compiling") as progress:

        def on_progress(done: int, total: int) -> None:
            if check is not None:
                check()
            progress(done, total)

        runner.warm_up(on_progress)
    trim_heap()
    reuse_freed_memory()
    gc.collect()
    gc.freeze()  # what exists now stays, and a collection that visits all of it would stop ticks


def use_huge_pages_for_weights(runner: DeviceRunner) -> None:
    """Put the weights on huge pages, on a thread while the first steps run.

    The range of a weight that moves meanwhile is put on huge pages in vain, which has no other effect.
    """
    threading.Thread(target=use_huge_pages, args=[_places_on_host(runner.weights)], daemon=True).start()


def program_cache(
    folder: str, model: ModelConfig, config: ServerConfig, devices: list[jax.Device]
) -> ProgramCache | None:
    """Return the cache of compiled programs, None if it is off or has no place."""
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
    """Return the peak memory of this process as text, empty if the system does not provide it."""
    try:
        return f"; peak memory {host_memory().peak / 2**30:.1f} GiB"
    except OSError:
        return ""


def _places_on_host(weights: Any) -> list[tuple[int, int]]:
    """Return (address, bytes) of each weight that a CPU device holds."""
    import jax

    shards = [shard for array in jax.tree.leaves(weights) for shard in array.addressable_shards]
    return [
        (shard.data.unsafe_buffer_pointer(), shard.data.nbytes) for shard in shards if shard.device.platform == "cpu"
    ]
