"""The jitted step and its arrays on the devices: weights, KV pages, counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gimbal_jax.config import EngineConfig, ModelConfig
from gimbal_jax.model.inputs import Logprobs, PackedInputs, RareInputs, StepInputs, StepOutputs, StepShape, unpack
from gimbal_jax.model.prompt_logprobs import prompt_logprobs
from gimbal_jax.model.sampling import no_logprobs, sample
from gimbal_jax.model.sharding import kv_heads_in_cache, put, sharding_for
from gimbal_jax.model.transformer import KVPages, Qwen3Moe, StepLayout
from gimbal_jax.pallas_kernels import Backend
from gimbal_jax.pallas_kernels.paged_attention_mosaic import mosaic_limits

COMPILER_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}
"""XLA options to compile a step with. XLA tries to stay below four fifths of a GPU's memory. If weights and KV pool
take more, it recomputes values, collectives too, to save memory. The pool's size already leaves room for a step."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """Arrays that a step updates in place; they are donated to it."""

    pages: list[KVPages]
    """Keys and values of each layer."""
    counts_STLE: jax.Array
    """int32 tokens per (source, tp rank, MoE layer, expert) since the counter was last zeroed."""
    chosen_SR: jax.Array
    """int32 token that each engine row chose last; -1 if its logits were not finite."""


def check_kernels(config: ModelConfig, engine: EngineConfig, tp: int, dtype: Any, backend: Backend) -> None:
    """Raise ValueError if the backend's kernels do not support a step of this model. The text names all broken rules.

    Args:
      config: the model.
      engine: settings of an engine.
      tp: ranks of an engine.
      dtype: type of hidden states and KV pages.
      backend: form of the kernels.
    """
    if backend != "xla":
        heads_per_kv_head = config.num_heads // kv_heads_in_cache(config, tp)
        if limits := mosaic_limits(dtype, config.head_dim, engine.page_size, heads_per_kv_head):
            raise ValueError("; ".join(limits))


def abstract_model(config: ModelConfig, dtype: Any, mesh: Mesh) -> tuple[nnx.GraphDef, nnx.State]:
    """Return the model's graph and its parameters as shapes of this type with shardings. No memory is allocated."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Qwen3Moe(config, dtype, mesh.shape["tp"])))

    def placed(variable: nnx.Variable) -> nnx.Variable:
        shape = variable.get_value()
        sharding = sharding_for(variable.get_metadata("axes"), shape.shape, mesh)
        return variable.replace(jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding))

    return graph, jax.tree.map(placed, state, is_leaf=lambda v: isinstance(v, nnx.Variable))


def abstract_state(config: ModelConfig, engine: EngineConfig, dtype: Any, mesh: Mesh) -> DeviceState:
    """Return the state as shapes with shardings; ``dtype`` is that of the KV pages. No memory is allocated."""
    dp, tp = mesh.shape["dp"], mesh.shape["tp"]
    pages_shape = (dp, engine.num_pages, engine.page_size, kv_heads_in_cache(config, tp), config.head_dim)
    on_mesh = sharding_for(("source", None, None, "kv_heads", None), pages_shape, mesh)
    pages: Any = jax.ShapeDtypeStruct(pages_shape, dtype, sharding=on_mesh)
    counts_shape = (dp, tp, len(config.moe_layers), config.num_experts)
    counts: Any = jax.ShapeDtypeStruct(counts_shape, jnp.int32, sharding=NamedSharding(mesh, P("dp", "tp")))
    chosen: Any = jax.ShapeDtypeStruct((dp, engine.max_rows), jnp.int32, sharding=NamedSharding(mesh, P("dp")))
    return DeviceState([(pages, pages)] * config.num_layers, counts, chosen)


def new_state(config: ModelConfig, engine: EngineConfig, dtype: Any, mesh: Mesh) -> DeviceState:
    """Allocate the state in its shards, all zeros; ``dtype`` is that of the KV pages."""
    return jax.tree.map(
        lambda array: jnp.zeros(array.shape, array.dtype, device=array.sharding),
        abstract_state(config, engine, dtype, mesh),
    )


def step(
    graph: nnx.GraphDef,
    layout: StepLayout,
    shape: StepShape,
    weights: nnx.State,
    state: DeviceState,
    slot_of_expert_LE: jax.Array,
    packed_SX: jax.Array,
    rare: RareInputs,
) -> tuple[StepOutputs, DeviceState]:
    """Run one step of all engines: forward pass, counts, sampling and log probabilities of prompts.

    Jit it with graph, layout and shape static and with state donated.

    Args:
      graph: the model's graph, from ``abstract_model``.
      layout: mesh, tile, exchange and backend.
      shape: sizes of the step.
      weights: parameters in the shards of ``abstract_model``.
      state: pages, counters and last tokens.
      slot_of_expert_LE: int32 placement of the MoE layers.
      packed_SX: int32 inputs of the step (see ``inputs.unpack``).
      rare: rare settings, by engine row.

    Returns:
      The step's outputs and the new state.
    """
    model = nnx.merge(graph, weights)
    _, num_pages, page_size, *_ = state.pages[0][0].shape
    lay_out = _by_engine(partial(_forward_inputs, shape, num_pages, page_size), layout.mesh)
    inputs, packed = lay_out(packed_SX, state.chosen_SR)
    hidden_STD, pages, counts_STLE = model(inputs, state.pages, slot_of_expert_LE, layout)
    # Logits are needed for the last token of each sequence only. Without tiles, that is every token place.
    last_SC1 = packed.last_SC[..., None]
    hidden_SCD = jnp.take_along_axis(hidden_STD, last_SC1, axis=1) if shape.tiles else hidden_STD
    choose = _by_engine(_choose, layout.mesh, split_by_engine(rare))
    logits_SCV = model.logits(hidden_SCD, layout)
    token_SC, logprobs, chosen_SR = choose(logits_SCV, inputs, packed, state.chosen_SR, rare)
    outputs = StepOutputs(token_SC, logprobs, _prompt_logprobs(model, hidden_STD, rare, shape, layout))
    return outputs, DeviceState(pages, state.counts_STLE + counts_STLE, chosen_SR)


def _by_engine(function: Callable[..., Any], mesh: Mesh, *last_specs: Any) -> Callable[..., Any]:
    """Run a function of arrays split by engine on each engine, so that gather, sort and scatter need no collective.

    The last arguments have the partitions ``last_specs``; the others, and all results, are split by engine.
    """

    def on_mesh(*args: Any) -> Any:
        specs = (P("dp"),) * (len(args) - len(last_specs)) + last_specs
        return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P("dp"), check_vma=False)(*args)

    return on_mesh


def _forward_inputs(
    shape: StepShape, num_pages: int, page_size: int, packed_SX: jax.Array, chosen_SR: jax.Array
) -> tuple[StepInputs, PackedInputs]:
    """Derive the inputs of every token place from packed inputs and from the last tokens, for one engine (S = 1)."""
    packed = unpack(packed_SX, shape)
    rows, tiles, tile = shape.rows, shape.tiles, shape.tile
    chosen_SC = jnp.take_along_axis(chosen_SR, packed.row_SC, axis=1, mode="clip")
    tokens_ST = packed.tokens_ST
    # A decode row without a token from the host takes its last one. That is -1 after bad logits: such a row goes on
    # with token 0 until the host learns of it.
    known_SC = jnp.maximum(jnp.where(tokens_ST[:, :rows] < 0, chosen_SC[:, :rows], tokens_ST[:, :rows]), 0)
    tokens_ST = tokens_ST.at[:, :rows].set(known_SC)

    # Group of each token place and the place within the group: constants of the program.
    group_T = np.concatenate([np.arange(rows), rows + np.repeat(np.arange(tiles), tile)]).astype(np.int32)
    offset_T = np.concatenate([np.zeros(rows), np.tile(np.arange(tile), tiles)]).astype(np.int32)
    # Each group's page table is that of its sequence.
    sequence_SG = jnp.concatenate(
        [jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (len(packed_SX), rows)), packed.sequence_SN], axis=1
    )
    table_SCM = packed.page_table_SCM
    table_SGM = jnp.take_along_axis(table_SCM, sequence_SG[..., None], axis=1) if tiles else table_SCM
    # Position and KV place of each token; padding writes past the end, where a scatter drops it.
    real_ST = offset_T < packed.count_SG[:, group_T]
    positions_ST = jnp.where(real_ST, packed.start_SG[:, group_T] + offset_T, 0)
    page_ST = jnp.take_along_axis(table_SGM[:, group_T], positions_ST[..., None] // page_size, axis=2)[..., 0]
    write_ST = jnp.where(real_ST, page_ST * page_size + positions_ST % page_size, num_pages * page_size)
    inputs = StepInputs(tokens_ST, positions_ST, write_ST, table_SGM, packed.start_SG, packed.count_SG)
    return inputs, packed


def _choose(
    logits_SCV: jax.Array, inputs: StepInputs, packed: PackedInputs, chosen_SR: jax.Array, rare: RareInputs
) -> tuple[jax.Array, Logprobs, jax.Array]:
    """Choose one engine's next tokens and update its rows' last tokens. The leading axis of all arrays is S = 1."""
    (last_C, row_C, s), (tokens_T, positions_T) = jax.tree.map(
        lambda array: array[0],
        ((packed.last_SC, packed.row_SC, packed.sampling), (inputs.tokens_ST, inputs.positions_ST)),
    )
    own = jax.tree.map(lambda array: array[0] if array.ndim else array, rare)
    token_C, logprobs = sample(logits_SCV[0], tokens_T[last_C], positions_T[last_C] + 1, row_C, s, own)
    return (
        token_C[None],
        jax.tree.map(lambda array: array[None], logprobs),
        chosen_SR.at[0, row_C].set(token_C, mode="drop"),
    )


def _prompt_logprobs(
    model: Qwen3Moe, hidden_STD: jax.Array, rare: RareInputs, shape: StepShape, layout: StepLayout
) -> Logprobs | None:
    """Return the log probabilities of the targets; zeros if no place has one, and None without tiles.

    A block has at most as many places as there are sequences, so it needs no more logits than sampling.
    """
    if shape.tiles == 0:
        return None
    places = shape.tiles * shape.tile
    return jax.lax.cond(
        rare.want_targets,
        lambda: prompt_logprobs(
            hidden_STD[:, shape.rows :],
            rare.targets_ST[:, :places],
            model.output_table,
            shape.sequences,
            layout.mesh,
        ),
        lambda: no_logprobs((len(hidden_STD), places), model.config.vocab_size),
    )


def split_by_engine(inputs: Any) -> Any:
    """Return the partition of each array of a step's inputs: split by engine, and scalars replicated."""
    return jax.tree.map(lambda array: P("dp") if array.ndim else P(), inputs)


def put_by_engine(inputs: Any, mesh: Mesh) -> Any:
    """Put a step's inputs on the devices of their engines."""
    return jax.tree.map(lambda array, spec: put(array, NamedSharding(mesh, spec)), inputs, split_by_engine(inputs))


def put_new(inputs: Any, old: Any, mesh: Mesh) -> Any:
    """Put a step's inputs on the devices of their engines, except for arrays of ``old``, which are there already."""
    return jax.tree.map(lambda new, known: known if new is known else put_by_engine(new, mesh), inputs, old)
