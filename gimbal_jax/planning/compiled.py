"""The server's own programs, compiled for GPUs that are not there, and what the compiler says of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gimbal_jax.config import ModelConfig, ServerConfig
from gimbal_jax.model.experts import exchange_table, move_experts
from gimbal_jax.model.sharding import make_mesh
from gimbal_jax.model.step import abstract_model, abstract_state, step
from gimbal_jax.model.transformer import StepLayout
from gimbal_jax.pallas_kernels import backend_of
from gimbal_jax.planning.gpus import Gpu
from gimbal_jax.planning.target import compile_only_devices
from gimbal_jax.serving.batch import Bucket, stack, step_buckets
from gimbal_jax.serving.plan import Plan


@dataclass(frozen=True)
class Program:
    """A compiled program. Sizes are bytes per GPU, as XLA's buffer assignment has them."""

    hlo: str
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    """Of the outputs, what takes over an argument's memory."""
    temporary_bytes: int
    donated: frozenset[int]
    """Numbers of the parameters that the caller gives away."""
    compile_s: float

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes - self.aliased_bytes + self.temporary_bytes


def bucket_kinds(config: ServerConfig) -> dict[str, Bucket]:
    """The extreme shapes of steps that a server compiles: no prefill, all of both, the fewest rows with all prefill."""
    buckets = step_buckets(config.engine, config.mesh.tp)
    rows, tiles = max(rows for rows, _ in buckets), max(tiles for _, tiles in buckets)
    return {"decode": (rows, 0), "mixed": (rows, tiles), "prefill": (min(rows for rows, _ in buckets), tiles)}


def compile_step(model: ModelConfig, config: ServerConfig, gpu: Gpu, bucket: Bucket) -> Program:
    """The step of this bucket, in bfloat16, as ``DeviceRunner.warm_up`` would compile it on such GPUs."""
    devices = compile_only_devices(gpu, config.mesh.ranks)
    mesh = make_mesh(config.mesh, devices)
    graph, weights = abstract_model(model, jnp.bfloat16, mesh)
    state = abstract_state(model, config.engine, jnp.bfloat16, mesh)
    slots = jax.ShapeDtypeStruct((len(model.moe_layers), model.num_experts), jnp.int32)
    inputs = _shapes(stack([Plan()] * config.mesh.dp, config.engine, *bucket))
    layout = StepLayout(mesh, config.engine.tile, config.engine.exchange, backend_of(devices[0]))
    run = jax.jit(partial(step, graph, layout), donate_argnums=1)
    return _compile(run, (weights, state, slots, inputs), donated=1, devices=devices)


def compile_migration(model: ModelConfig, config: ServerConfig, gpu: Gpu) -> Program:
    """One round of moves of a layer's experts."""
    devices = compile_only_devices(gpu, config.mesh.ranks)
    mesh = make_mesh(config.mesh, devices)
    _, weights = abstract_model(model, jnp.bfloat16, mesh)
    mlp = weights["layers"][model.moe_layers[0]]["mlp"]
    experts = tuple(mlp[name].get_value() for name in ("gate_up", "down"))
    nowhere = np.zeros(0, np.int32)
    sizes = (model.num_experts, config.mesh.ranks, config.placement.rows_per_pair)
    table = _shapes(exchange_table(nowhere, nowhere, *sizes))
    run = jax.jit(partial(move_experts, mesh=mesh), donate_argnums=0)
    return _compile(run, (experts, *table), donated=0, devices=devices)


def _shapes(arrays: Any) -> Any:
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arrays)


def _compile(run: Any, arguments: tuple[Any, ...], *, donated: int, devices: Any) -> Program:
    started = time.perf_counter()
    with jax.default_device(devices[0]):
        compiled = run.lower(*arguments).compile()
    memory = compiled.memory_analysis()
    return Program(
        hlo=compiled.as_text(),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        donated=frozenset(_flat_numbers(arguments, donated)),
        compile_s=time.perf_counter() - started,
    )


def _flat_numbers(arguments: tuple[Any, ...], which: int) -> Iterator[int]:
    """Numbers, as the compiled program counts its parameters, of the arrays of one argument."""
    sizes = [len(jax.tree.leaves(argument)) for argument in arguments]
    yield from range(sum(sizes[:which]), sum(sizes[: which + 1]))
