"""A whole model with random weights on one device, and inputs for its steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.device.setting import Sizes
from benchmarks.device.timing import fast_key
from benchmarks.plans import greedy_rows
from gimbal_jax.config import EngineConfig, MeshConfig, ModelConfig
from gimbal_jax.model.inputs import PackedInputs, RareInputs, StepOutputs, StepShape, step_shape, unpack
from gimbal_jax.model.sharding import make_mesh
from gimbal_jax.model.step import DeviceState, abstract_model, abstract_state, put_by_engine, step
from gimbal_jax.model.transformer import StepLayout
from gimbal_jax.pallas_kernels import Backend
from gimbal_jax.serving.engine.plan import Chunk, Plan
from gimbal_jax.serving.engine.request import SamplingParams
from gimbal_jax.serving.runtime.batch import default_rare_inputs, pack_step

SPARE_BYTES = 3 * 10**9
"""Bytes kept free for a step, in addition to weights and KV pages."""
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True)
class Work:
    """Inputs of one step of one engine."""

    shape: StepShape
    packed_SX: np.ndarray
    rare: RareInputs

    @property
    def parts(self) -> PackedInputs:
        """Views of the packed arrays, to read or to change."""
        return unpack(self.packed_SX, self.shape)


@dataclass
class RandomModel:
    """Weights, pages and counters of one engine on one device."""

    config: ModelConfig
    engine: EngineConfig
    graph: nnx.GraphDef
    weights: nnx.State
    state: DeviceState
    slots_LE: jax.Array

    def lower(self, work: Work, backend: Backend) -> jax.stages.Lowered:
        """Lower the server's step for work of this shape."""
        layout = StepLayout(_mesh(), self.engine.tile, self.engine.exchange, backend)
        run = jax.jit(partial(step, self.graph, layout, work.shape), donate_argnums=1)
        return run.lower(self.weights, self.state, self.slots_LE, work.packed_SX, work.rare)

    def run(self, compiled: jax.stages.Compiled, work: Work) -> StepOutputs:
        outputs, self.state = compiled(self.weights, self.state, self.slots_LE, work.packed_SX, work.rare)
        return outputs

    def counts_LE(self) -> np.ndarray:
        """Return the tokens of each MoE layer and expert since the start."""
        return np.asarray(self.state.counts_STLE).sum(axis=(0, 1))


def random_model(config: ModelConfig, engine: EngineConfig, seed: int) -> RandomModel:
    """Return a model whose weights are made on the device, without a copy on the host."""
    graph, abstract = abstract_model(config, jnp.bfloat16, _mesh())
    for_weights, for_pages = jax.random.split(fast_key(seed))
    return RandomModel(
        config,
        engine,
        graph,
        random_like(abstract, for_weights),
        random_like(abstract_state(config, engine, jnp.bfloat16, _mesh()), for_pages),
        jnp.tile(jnp.arange(config.num_experts, dtype=jnp.int32), (len(config.moe_layers), 1)),
    )


def engine_of(sizes: Sizes) -> EngineConfig:
    """Return the configuration of one engine with pages for the largest batch."""
    longest = max(sizes.context, sizes.prefill_tokens)
    engine = EngineConfig(
        max_model_len=longest,
        page_size=sizes.page_size,
        max_rows=max(sizes.batches),
        token_budget=sizes.prefill_tokens,
        tile=sizes.tile,
    )
    pages = max(engine.max_rows * -(-sizes.context // engine.page_size), engine.pages_per_row)
    return replace(engine, num_pages=pages)


def first_layers(model: ModelConfig, layers: int) -> ModelConfig:
    moe_layers = tuple(layer for layer in model.moe_layers if layer < layers)
    return replace(model, num_layers=layers, moe_layers=moe_layers)


def layers_that_fit(model: ModelConfig, engine: EngineConfig, memory_bytes: int | None) -> ModelConfig:
    """Return the model, or its first layers if not all fit into the memory. None means unknown memory: all layers.

    Raises ValueError if not even one layer fits.
    """
    for layers in range(model.num_layers, 0, -1):
        config = first_layers(model, layers)
        _, weights = abstract_model(config, jnp.bfloat16, _mesh())
        pages = abstract_state(config, engine, jnp.bfloat16, _mesh()).pages
        if memory_bytes is None or nbytes(weights) + nbytes(pages) + SPARE_BYTES <= memory_bytes:
            return config
    raise ValueError(f"device memory {memory_bytes} bytes: must hold at least one layer")


def random_like(abstract: Any, key: jax.Array) -> Any:
    """Return arrays of these shapes, made on their devices: vectors of ones, integer counters of zeros, normal weights.

    The standard deviation of the weights is 0.02, as in the initialisation by transformers.
    """
    make = jax.jit(lambda key, like: (0.02 * jax.random.normal(key, like.shape)).astype(like.dtype), static_argnums=1)
    leaves, tree = jax.tree.flatten(abstract)
    arrays = []
    for number, like in enumerate(leaves):
        if jnp.issubdtype(like.dtype, jnp.integer):
            arrays.append(jnp.zeros(like.shape, like.dtype, device=like.sharding))
        elif like.ndim == 1:
            arrays.append(jnp.ones(like.shape, like.dtype, device=like.sharding))
        else:
            arrays.append(make(jax.random.fold_in(key, number), like))
    return jax.tree.unflatten(tree, arrays)


def decode_work(sizes: Sizes, engine: EngineConfig, batch: int, rng: np.random.Generator) -> Work:
    """Return a decode step of ``batch`` rows, each of which computes the last token of its context."""
    pages = -(-sizes.context // engine.page_size)
    pages_of_row = rng.permutation(engine.num_pages)[: batch * pages].reshape(batch, pages).astype(np.int32)
    tokens = rng.integers(0, sizes.model.vocab_size, batch).astype(np.int32)
    rows = greedy_rows(tokens, np.full(batch, sizes.context - 1, np.int32), pages_of_row)
    return _work(Plan(rows), step_shape(engine, (batch, 0)), sizes, engine)


def prefill_work(sizes: Sizes, engine: EngineConfig, rng: np.random.Generator) -> Work:
    """Return a prefill step of one prompt and an empty decode row."""
    tokens = rng.integers(0, sizes.model.vocab_size, sizes.prefill_tokens).astype(np.int32)
    tiles = -(-len(tokens) // engine.tile)
    pages = rng.permutation(engine.num_pages)[: -(-len(tokens) // engine.page_size)].astype(np.int32)
    nothing = np.zeros(0, np.int32)
    plan = Plan(greedy_rows(nothing, nothing, nothing[:, None]), (Chunk(0, tokens, 0, pages, GREEDY),), tiles)
    return _work(plan, step_shape(engine, (1, tiles)), sizes, engine)


def _work(plan: Plan, shape: StepShape, sizes: Sizes, engine: EngineConfig) -> Work:
    unasked = put_by_engine(default_rare_inputs(engine, sizes.model.vocab_size, engines=1), _mesh())
    return Work(shape, *pack_step([plan], shape, unasked))


def _mesh() -> jax.sharding.Mesh:
    return make_mesh(MeshConfig(), jax.devices()[:1])


def nbytes(tree: Any) -> int:
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
