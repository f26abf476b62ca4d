"""jax's devices as the user names them, and weights on a mesh of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gimbal_jax.cli.terminal import progress_bar
from gimbal_jax.config import MEMORY_UTILISATION, MeshConfig, ModelConfig

if TYPE_CHECKING:
    import jax

DEVICES_HELP = "`auto`, `gpu`, `cpu`, or `cpu:N` for N virtual CPU devices."
DTYPE_HELP = (
    "Type of weights, hidden states and KV cache; auto is float32 on CPU and the checkpoint's own elsewhere. "
    "Where a CPU computes in float32, it keeps weights that are stored in bfloat16 so, if that is faster."
)


def set_up_devices(devices: str, mesh: MeshConfig, memory_utilisation: float = MEMORY_UTILISATION) -> list[jax.Device]:
    """Choose jax's devices, enough for the mesh, and their memory; must come before anything else uses jax.

    Where several processes have joined they are those of all of them, and the mesh must take them all: who has no part
    in a step cannot follow it.
    """
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
    try:
        available = jax.devices()
    except (RuntimeError, AssertionError) as error:  # without a plugin for the platform jax asserts
        raise ValueError(f"--devices {devices}: jax finds none of them") from error
    if jax.process_count() > 1 and len(available) != mesh.ranks:
        of_each = f"{jax.process_count()} processes with {jax.local_device_count()} devices each"
        raise ValueError(f"dp * tp = {mesh.ranks}: must be all {len(available)} devices of {of_each}")
    if len(available) < mesh.ranks:
        wanted = f"dp * tp = {mesh.ranks} devices are needed and there are {len(available)} ({available[0].platform})"
        raise ValueError(f"{wanted}; for virtual CPU devices: --devices cpu:{mesh.ranks}")
    return available


def load_on_mesh(
    folder: Path, model: ModelConfig, mesh_config: MeshConfig, devices: list[jax.Device], dtype: str
) -> tuple[Any, Any, jax.sharding.Mesh]:
    """(weights, slot_of_expert_LE, mesh) with a progress bar."""
    from gimbal_jax.model.loading import load_weights
    from gimbal_jax.model.sharding import make_mesh

    mesh = make_mesh(mesh_config, devices)
    with progress_bar("loading") as progress:
        return *load_weights(folder, model, mesh, dtype, progress), mesh
