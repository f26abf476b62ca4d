"""The mesh, and the one table of the mesh axes over which each logical axis is split."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gimbal_jax.config import MeshConfig, ModelConfig

RANKS = ("dp", "tp")
"""Mesh axes of the expert-parallel ranks; rank r = dp index * tp + tp index."""

MESH_AXES: dict[str, str | tuple[str, ...] | None] = {
    "source": "dp",  # engines: their parts of a batch, of the KV pages and of the counters
    "vocab": "tp",
    "embed": None,
    "heads": "tp",
    "kv_heads": "tp",  # copies included: see kv_heads_in_cache
    "group": None,  # a KV head's query heads, then its key and its value
    "head_dim": None,
    "gate_up": None,
    "mlp": "tp",
    "router": None,
    "slot": RANKS,
    "expert_mlp": None,
}
"""Mesh axes of each logical axis; None is replicated."""


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a (dp, tp) mesh over the first dp * tp devices. Raise ValueError if there are fewer."""
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < config.ranks:
        raise ValueError(f"a {config.dp} x {config.tp} mesh needs {config.ranks} devices; there are {len(devices)}")
    grid = np.array(devices[: config.ranks]).reshape(config.dp, config.tp)
    return Mesh(grid, RANKS, axis_types=(AxisType.Auto, AxisType.Auto))


def check_mesh(model: ModelConfig, mesh: MeshConfig) -> None:
    """Raise ValueError if this mesh does not fit the model. The text names all rules that it breaks."""
    tp, ranks, wrong = mesh.tp, mesh.ranks, []
    if mesh.dp < 1 or tp < 1:
        raise ValueError(f"dp and tp must be at least 1, got dp={mesh.dp}, tp={tp}")
    for name, size in (("num_attention_heads", model.num_heads), ("vocab_size", model.vocab_size)):
        if size % tp:
            wrong.append(f"{name} = {size} must be divisible by tp = {tp}")
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        wrong.append(f"num_key_value_heads = {model.num_kv_heads} and tp = {tp}: one must divide the other")
    if len(model.moe_layers) < model.num_layers and model.intermediate_size % tp:
        wrong.append(f"intermediate_size = {model.intermediate_size} must be divisible by tp = {tp}")
    if model.num_experts % ranks:
        fits = [n for n in range(1, model.num_experts + 1) if model.num_experts % n == 0]
        wrong.append(f"num_experts = {model.num_experts} must be divisible by dp * tp = {ranks}; {fits} would work")
    if wrong:
        raise ValueError("; ".join(wrong))


def kv_heads_in_cache(model: ModelConfig, tp: int) -> int:
    """Return the number of KV heads in the cache. With more tp ranks than heads, each rank holds a copy of one head."""
    return max(model.num_kv_heads, tp)


def spec_for(axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Return the partition of an array with these logical axes. An axis that its mesh axes do not divide is replicated.

    Args:
      axes: logical axes, keys of ``MESH_AXES``; None is replicated.
      shape: sizes of the axes.
      mesh: (dp, tp).
    """

    def mesh_axis(axis: str | None, size: int) -> str | tuple[str, ...] | None:
        names = MESH_AXES[axis] if axis else None
        parts = int(np.prod([mesh.shape[n] for n in ((names,) if isinstance(names, str) else names or ())]))
        return names if size % parts == 0 else None

    return PartitionSpec(*(mesh_axis(a, n) for a, n in zip(axes, shape, strict=True)))


def sharding_for(axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """Return ``spec_for`` as a sharding on this mesh."""
    return NamedSharding(mesh, spec_for(axes, shape, mesh))


def put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Put an array of the host on a mesh. If the mesh spans processes, each process puts the shards of its own devices.

    The arrays of the processes are not compared, so no process waits for the others here.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
