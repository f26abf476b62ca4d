"""The devices of jax that the user chooses, and weights on a mesh of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gimbal_jax.config import MEMORY_UTILISATION, MeshConfig, ModelConfig

if TYPE_CHECKING:
    import jax


def set_up_devices(devices: str, mesh: MeshConfig, memory_utilisation: float = MEMORY_UTILISATION) -> list[jax.Device]:
    """Choose jax's devices, enough for the mesh, and their memory. Call it before anything else uses jax.

    If several processes have joined, the devices are those of all processes, and the mesh must take them all, because
    a process without a part in a step cannot follow it.

    Args:
      devices: ``auto``, ``gpu``, ``cpu`` or ``cpu:N``.
      mesh: dp * tp devices are needed.
      memory_utilisation: share of each GPU's memory that jax takes.

    Raises:
      ValueError: an unknown text, or too few devices.
    """
    import jax

    platform, _, count = devices.partition(":")
    if platform not in ("auto", "gpu", "cpu") or (count and (platform != "cpu" or not count.isdigit())):
        raise ValueError(f"--devices {devices}: must be auto, gpu, cpu or cpu:N")
    if platform != "auto":
        jax.config.update("jax_platforms", {"gpu": "cuda", "cpu": "cpu"}[platform])
    if count:
        jax.config.update("jax_num_cpu_devices", int(count))
    # Only GPUs obey this. jax takes their memory at once when it starts, and would take a share of its own choice.
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
    folder: Path,
    model: ModelConfig,
    mesh_config: MeshConfig,
    devices: list[jax.Device],
    dtype: str,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Any, Any, jax.sharding.Mesh]:
    """Return (weights, slot_of_expert_LE, mesh) of a checkpoint; ``progress`` as in ``load_weights``."""
    from gimbal_jax.model.loading import load_weights
    from gimbal_jax.model.sharding import make_mesh

    mesh = make_mesh(mesh_config, devices)
    listener = {} if progress is None else {"progress": progress}
    return *load_weights(folder, model, mesh, dtype, **listener), mesh
