"""The server's own programs, compiled for GPUs that are not there, with the sizes that the compiler reports."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gimbal_jax.config import ModelConfig, ServerConfig
from gimbal_jax.model.experts import exchange_table, move_experts
from gimbal_jax.model.inputs import Bucket, StepShape, step_shape
from gimbal_jax.model.sharding import make_mesh
from gimbal_jax.model.step import COMPILER_OPTIONS, abstract_model, abstract_state, split_by_engine, step
from gimbal_jax.model.transformer import StepLayout
from gimbal_jax.pallas_kernels import backend_of
from gimbal_jax.planning.hardware import Gpu
from gimbal_jax.planning.target import compile_only_devices
from gimbal_jax.serving.runtime.batch import default_rare_inputs, step_buckets

StepKind = Literal["decode", "mixed"]


@dataclass(frozen=True)
class Program:
    """A compiled program. Sizes are bytes per GPU, by XLA's buffer assignment."""

    hlo: str
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    """Outputs that take over the memory of an argument."""
    temporary_bytes: int
    donated: frozenset[int]
    """Numbers of the parameters that the caller gives away."""
    layers: int
    """Number of compiled layers. If the model has more, the sizes of arguments and outputs are those of all layers.
    Temporaries are those of the compiled ones, because layers run one after the other and use the same memory."""
    compile_s: float
    """Seconds of compiling."""

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes - self.aliased_bytes + self.temporary_bytes


def bucket_kinds(config: ServerConfig) -> dict[StepKind, Bucket]:
    """Return the largest steps that a server compiles: without prefill, and with all rows and tiles."""
    buckets = step_buckets(config.engine, config.mesh.tp)
    rows, tiles = max(rows for rows, _ in buckets), max(tiles for _, tiles in buckets)
    return {"decode": (rows, 0), "mixed": (rows, tiles)}


def shallow(model: ModelConfig, layers: int) -> ModelConfig:
    """Return the model cut to its first layers."""
    return replace(model, num_layers=layers, moe_layers=tuple(l for l in model.moe_layers if l < layers))


def compile_step(
    model: ModelConfig, config: ServerConfig, gpu: Gpu, bucket: Bucket, layers: int | None = None
) -> Program:
    """Compile the step of a bucket, in bfloat16, as ``DeviceRunner.warm_up`` would on such GPUs.

    Args:
      model: the architecture.
      config: settings of the server.
      gpu: kind of the ``config.mesh.ranks`` GPUs, in the nodes of the mesh.
      bucket: (decode rows, prefill tiles).
      layers: number of first layers to compile; None for all. See ``Program.layers``.
    """
    devices = compile_only_devices(gpu, config.mesh.ranks, config.mesh.nodes)
    mesh = make_mesh(config.mesh, devices)
    layers = model.num_layers if layers is None else min(layers, model.num_layers)
    _, all_arguments = _step_arguments(model, config, mesh)
    graph, arguments = _filled_arguments(shallow(model, layers), config, mesh, _device_bytes(all_arguments))
    shape = step_shape(config.engine, bucket)
    layout = StepLayout(mesh, config.engine.tile, config.engine.exchange, backend_of(devices[0]))
    # With several nodes the leading host does not have all devices, so every device keeps the results for the host.
    for_host = NamedSharding(mesh, PartitionSpec()) if config.mesh.nodes > 1 else None
    run = jax.jit(partial(step, graph, layout, shape), donate_argnums=1, out_shardings=(for_host, None))
    program = _compile(run, (*arguments, *_step_inputs(model, config, mesh, shape)), donated=1, devices=devices)
    # Extend the sizes to all layers.
    more_state = _device_bytes(all_arguments[1]) - _device_bytes(arguments[1])
    return replace(
        program,
        argument_bytes=program.argument_bytes + _device_bytes(all_arguments) - _device_bytes(arguments),
        output_bytes=program.output_bytes + more_state,
        aliased_bytes=program.aliased_bytes + more_state,
        layers=layers,
    )


def _step_arguments(model: ModelConfig, config: ServerConfig, mesh: Mesh) -> tuple[nnx.GraphDef, tuple[Any, ...]]:
    """Return the graph, and weights, state and placement as shapes with shardings."""
    graph, weights = abstract_model(model, jnp.bfloat16, mesh)
    state = abstract_state(model, config.engine, jnp.bfloat16, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    slots = jax.ShapeDtypeStruct((len(model.moe_layers), model.num_experts), jnp.int32, sharding=everywhere)
    return graph, (weights, state, slots)


def _filled_arguments(
    model: ModelConfig, config: ServerConfig, mesh: Mesh, size: int
) -> tuple[nnx.GraphDef, tuple[Any, ...]]:
    """Return ``_step_arguments`` with a KV pool that is enlarged until they take ``size`` bytes on each device.

    XLA compiles differently if memory is short, so few layers must take the memory of all.
    """
    _, arguments = _step_arguments(model, config, mesh)
    pages = config.engine.num_pages
    more = (size - _device_bytes(arguments)) * pages // _device_bytes(arguments[1].pages)
    return _step_arguments(model, replace(config, engine=replace(config.engine, num_pages=pages + more)), mesh)


def _step_inputs(model: ModelConfig, config: ServerConfig, mesh: Mesh, shape: StepShape) -> tuple[Any, Any]:
    """Return the packed inputs and the rare inputs of a step as shapes with shardings."""
    unasked = default_rare_inputs(config.engine, model.vocab_size, config.mesh.dp)
    on_mesh = jax.tree.map(partial(NamedSharding, mesh), split_by_engine(unasked))
    by_engine = NamedSharding(mesh, PartitionSpec("dp"))
    packed_SX = jax.ShapeDtypeStruct((config.mesh.dp, shape.packed), jnp.int32, sharding=by_engine)
    return packed_SX, _shapes(unasked, on_mesh)


def compile_migration(model: ModelConfig, config: ServerConfig, gpu: Gpu) -> Program:
    """Compile one round of moves of a layer's experts."""
    devices = compile_only_devices(gpu, config.mesh.ranks, config.mesh.nodes)
    mesh = make_mesh(config.mesh, devices)
    _, weights = abstract_model(model, jnp.bfloat16, mesh)
    mlp: Any = weights["layers"][model.moe_layers[0]]["mlp"]
    experts = tuple(mlp[name].get_value() for name in ("gate_up", "down"))
    nowhere = np.zeros(0, np.int32)
    sizes = (model.num_experts, config.mesh.ranks, config.placement.rows_per_pair)
    table = _shapes(exchange_table(nowhere, nowhere, *sizes))
    run = jax.jit(partial(move_experts, mesh=mesh), donate_argnums=0)
    return _compile(run, (experts, *table), donated=0, devices=devices)


def _shapes(arrays: Any, shardings: Any = None) -> Any:
    def one(array: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return jax.tree.map(one, arrays) if shardings is None else jax.tree.map(one, arrays, shardings)


def _device_bytes(arrays: Any) -> int:
    """Return the bytes of the shards on one device."""
    return sum(prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(arrays))


def _compile(run: Any, arguments: tuple[Any, ...], *, donated: int, devices: Any) -> Program:
    started = time.perf_counter()
    with jax.default_device(devices[0]):
        compiled = run.lower(*arguments).compile(COMPILER_OPTIONS)
    memory = compiled.memory_analysis()
    return Program(
        hlo=compiled.as_text(),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        donated=frozenset(_flat_numbers(arguments, donated)),
        layers=1,
        compile_s=time.perf_counter() - started,
    )


def _flat_numbers(arguments: tuple[Any, ...], which: int) -> Iterator[int]:
    """Yield the parameter numbers of the arrays of one argument, in the order of the compiled program."""
    sizes = [len(jax.tree.leaves(argument)) for argument in arguments]
    yield from range(sum(sizes[:which]), sum(sizes[: which + 1]))
