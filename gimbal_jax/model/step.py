"""The jitted step and what it needs on the devices: weights, KV pages, counters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gimbal_jax.config import EngineConfig, ModelConfig
from gimbal_jax.model.inputs import Logprobs, StepInputs, StepOutputs, rows_and_tiles
from gimbal_jax.model.prompt_logprobs import prompt_logprobs
from gimbal_jax.model.sampling import no_logprobs, sample
from gimbal_jax.model.sharding import kv_heads_in_cache, sharding_for
from gimbal_jax.model.transformer import KVPages, Qwen3Moe, StepLayout
from gimbal_jax.pallas_kernels import Backend
from gimbal_jax.pallas_kernels.paged_attention_mosaic import mosaic_limits

COMPILER_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}
"""To compile a step with. XLA means to stay below four fifths of a GPU's memory, and where weights and KV pool are more
it computes whatever it can twice, collectives too. The pool is sized by what a step needs, so there is no need to."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """What a step updates in place; donated to it."""

    pages: list[KVPages]
    counts_STLE: jax.Array
    """int32 tokens per (source, tp rank, MoE layer, expert) since it was last zeroed."""


def check_kernels(config: ModelConfig, engine: EngineConfig, tp: int, dtype: Any, backend: Backend) -> None:
    """Raise ValueError, naming every rule that a step of this model would break for the backend's kernels."""
    if backend != "xla":
        heads_per_kv_head = config.num_heads // kv_heads_in_cache(config, tp)
        if limits := mosaic_limits(dtype, config.head_dim, engine.page_size, heads_per_kv_head):
            raise ValueError("; ".join(limits))


def abstract_model(config: ModelConfig, dtype: Any, mesh: Mesh) -> tuple[nnx.GraphDef, nnx.State]:
    """Graph and parameters of the model as shapes with shardings; no memory is used."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Qwen3Moe(config, dtype)))

    def placed(variable: nnx.Variable) -> nnx.Variable:
        shape = variable.get_value()
        sharding = sharding_for(variable.get_metadata("axes"), shape.shape, mesh)
        return variable.replace(jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding))

    return graph, jax.tree.map(placed, state, is_leaf=lambda v: isinstance(v, nnx.Variable))


def abstract_state(config: ModelConfig, engine: EngineConfig, dtype: Any, mesh: Mesh) -> DeviceState:
    """The state as shapes with shardings; no memory is used."""
    dp, tp = mesh.shape["dp"], mesh.shape["tp"]
    pages_shape = (dp, engine.num_pages, engine.page_size, kv_heads_in_cache(config, tp), config.head_dim)
    on_mesh = sharding_for(("source", None, None, "kv_heads", None), pages_shape, mesh)
    pages: Any = jax.ShapeDtypeStruct(pages_shape, dtype, sharding=on_mesh)
    counts_shape = (dp, tp, len(config.moe_layers), config.num_experts)
    counts: Any = jax.ShapeDtypeStruct(counts_shape, jnp.int32, sharding=NamedSharding(mesh, P("dp", "tp")))
    return DeviceState([(pages, pages)] * config.num_layers, counts)


def new_state(config: ModelConfig, engine: EngineConfig, dtype: Any, mesh: Mesh) -> DeviceState:
    """Empty KV pages and zero counters, allocated straight into their shards."""
    return jax.tree.map(
        lambda array: jnp.zeros(array.shape, array.dtype, device=array.sharding),
        abstract_state(config, engine, dtype, mesh),
    )


def step(
    graph: nnx.GraphDef,
    layout: StepLayout,
    weights: nnx.State,
    state: DeviceState,
    slot_of_expert_LE: jax.Array,
    inputs: StepInputs,
) -> tuple[StepOutputs, DeviceState]:
    """One step of all engines: forward, count, sample, log probabilities of prompts.

    Jit with graph and layout static and state donated.
    """
    model = nnx.merge(graph, weights)
    hidden_STD, pages, counts_STLE = model(inputs, state.pages, slot_of_expert_LE, layout)
    last_SG = last_token_of_group(inputs, layout.tile)
    hidden_SGD = jnp.take_along_axis(hidden_STD, last_SG[..., None], axis=1)
    token_SG, finite_SG, logprobs = _sample_by_engine(model.logits(hidden_SGD, layout), inputs, layout.mesh)
    outputs = StepOutputs(token_SG, finite_SG, logprobs, _prompt_logprobs(model, hidden_STD, inputs, layout))
    return outputs, DeviceState(pages, state.counts_STLE + counts_STLE)


def _sample_by_engine(logits_SGV: jax.Array, inputs: StepInputs, mesh: Mesh) -> tuple[jax.Array, jax.Array, Logprobs]:
    """Each engine samples its own rows, so that sorting and scattering need no collective."""
    position_SG = inputs.start_SG + inputs.count_SG
    specs = (P("dp"), P("dp"), split_by_engine(inputs.sampling), split_by_engine(inputs.rare))
    return jax.shard_map(sample, mesh=mesh, in_specs=specs, out_specs=P("dp"), check_vma=False)(
        logits_SGV, position_SG, inputs.sampling, inputs.rare
    )


def _prompt_logprobs(model: Qwen3Moe, hidden_STD: jax.Array, inputs: StepInputs, layout: StepLayout) -> Logprobs | None:
    """Of the targets, if there are any; no more logits at a time than for sampling."""
    (engines, tokens), groups = inputs.tokens_ST.shape, inputs.count_SG.shape[1]
    rows, tiles = rows_and_tiles(tokens, groups, layout.tile)
    if tiles == 0:
        return None
    places = tiles * layout.tile
    return jax.lax.cond(
        inputs.rare.want_targets,
        lambda: prompt_logprobs(
            hidden_STD[:, rows:], inputs.rare.targets_ST[:, :places], model.output_table, groups, layout.mesh
        ),
        lambda: no_logprobs((engines, places), model.config.vocab_size),
    )


def split_by_engine(inputs: Any) -> Any:
    """The partition of each array of a step's inputs."""
    return jax.tree.map(lambda array: P("dp") if array.ndim else P(), inputs)


def put_by_engine(inputs: Any, mesh: Mesh) -> Any:
    """Inputs of steps, on the devices of the engines that they are for."""
    return jax.device_put(inputs, jax.tree.map(partial(NamedSharding, mesh), split_by_engine(inputs)))


def last_token_of_group(inputs: StepInputs, tile: int) -> jax.Array:
    """Index into T of each group's last token [S, G]; its first place if it is empty."""
    tokens, groups = inputs.tokens_ST.shape[1], inputs.count_SG.shape[1]
    rows, _ = rows_and_tiles(tokens, groups, tile)
    place_G = jnp.arange(groups)
    first_G = jnp.where(place_G < rows, place_G, rows + (place_G - rows) * tile)
    return first_G + jnp.maximum(inputs.count_SG - 1, 0)
