"""The server's own step on a whole model with random weights, against the time that reading them takes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gimbal_jax.config import EngineConfig, MeshConfig, ModelConfig
from gimbal_jax.model.inputs import StepInputs
from gimbal_jax.model.sharding import make_mesh
from gimbal_jax.model.step import DeviceState, abstract_model, abstract_state, step
from gimbal_jax.model.transformer import StepLayout
from gimbal_jax.serving.batch import stack
from gimbal_jax.serving.plan import Chunk, Plan
from gimbal_jax.serving.request import SamplingParams
from scripts.device_checks.numerics import rng_for
from scripts.device_checks.parts import Result
from scripts.device_checks.setting import Setting, Sizes
from scripts.device_checks.timing import timing

SPARE_BYTES = 3 * 10**9
"""Left for what a step needs besides weights and pages."""
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def model_speed(setting: Setting) -> Iterator[Result]:
    """Decode steps at several batch sizes, then a prefill step."""
    sizes, rng = setting.sizes, rng_for(setting, "model")
    engine, device = engine_of(sizes), jax.devices()[0]
    config = layers_that_fit(sizes.model, engine, (device.memory_stats() or {}).get("bytes_limit"))
    mesh = make_mesh(MeshConfig(), [device])
    graph, abstract = abstract_model(config, jnp.bfloat16, mesh)
    weights = random_like(abstract, jax.random.key(setting.seed))
    state = random_like(abstract_state(config, engine, jnp.bfloat16, mesh), jax.random.key(setting.seed + 1))
    slots_LE = jnp.tile(jnp.arange(config.num_experts, dtype=jnp.int32), (len(config.moe_layers), 1))
    yield "model", {
        "layers": config.num_layers,
        "layers_of_the_whole": sizes.model.num_layers,
        "weight_bytes": nbytes(weights),
        "kv_bytes": nbytes(state.pages),
    }

    work = {f"decode {batch}": decode_inputs(sizes, engine, batch, rng) for batch in sizes.batches}
    work[f"prefill {sizes.prefill_tokens}"] = prefill_inputs(sizes, engine, rng)
    layout = StepLayout(mesh, engine.tile, engine.exchange, setting.backend)
    run = jax.jit(partial(step, graph, layout), donate_argnums=1)
    began = time.perf_counter()
    lowered = {name: run.lower(weights, state, slots_LE, inputs) for name, inputs in work.items()}
    with ThreadPoolExecutor(max_workers=4) as pool:  # XLA compiles outside the interpreter lock
        compiled = dict(zip(lowered, pool.map(lambda one: one.compile(), lowered.values()), strict=True))
    yield "compile", {"programs": len(compiled), "wall_s": time.perf_counter() - began}

    for name, inputs in work.items():
        result, state = time_steps(compiled[name], weights, state, slots_LE, inputs, sizes.samples)
        tokens = int(inputs.count_SG.sum())
        touched = touched_bytes(config, abstract, result.pop("experts_hit_L"))
        kv_bytes = int((inputs.start_SG + inputs.count_SG)[inputs.count_SG > 0].max()) * tokens * kv_token_bytes(config)
        facts: dict[str, Any] = {"tokens": tokens, "weight_bytes_touched": touched}
        tb_per_s = setting.ceiling("triad", "tb_per_s")
        if name.startswith("decode"):
            facts["kv_bytes_read"] = kv_bytes
            if tb_per_s:
                facts["weight_floor_us"] = touched / tb_per_s / 1e6
                facts["floor_with_kv_us"] = (touched + kv_bytes) / tb_per_s / 1e6
                for which in ("step", "back_to_back"):
                    facts[f"{which}_over_weight_floor"] = result[which]["median_us"] / facts["weight_floor_us"]
        facts["tokens_per_s"] = tokens / result["step"]["median_us"] * 1e6
        yield name, result | facts


def engine_of(sizes: Sizes) -> EngineConfig:
    """One engine with pages for the largest batch."""
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


def layers_that_fit(model: ModelConfig, engine: EngineConfig, memory_bytes: int | None) -> ModelConfig:
    """The model, or its first layers if the memory, where it is known, does not hold all."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    for layers in range(model.num_layers, 0, -1):
        moe_layers = tuple(layer for layer in model.moe_layers if layer < layers)
        config = replace(model, num_layers=layers, moe_layers=moe_layers)
        _, weights = abstract_model(config, jnp.bfloat16, mesh)
        pages = abstract_state(config, engine, jnp.bfloat16, mesh).pages
        if memory_bytes is None or nbytes(weights) + nbytes(pages) + SPARE_BYTES <= memory_bytes:
            return config
    raise ValueError(f"not one layer fits into {memory_bytes} bytes")


def random_like(abstract: Any, key: jax.Array) -> Any:
    """Arrays of these shapes, made where they belong: norms of one, counters of zero, the rest normal around 0.

    Their deviation of 0.02 is that with which transformers initialises such models.
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


def decode_inputs(sizes: Sizes, engine: EngineConfig, batch: int, rng: np.random.Generator) -> StepInputs:
    """``batch`` rows whose last token is the last one of their context."""
    pages = -(-sizes.context // engine.page_size)
    pages_of_row = rng.permutation(engine.num_pages)[: batch * pages].reshape(batch, pages).astype(np.int32)
    tokens = rng.integers(0, sizes.model.vocab_size, (batch, 1)).astype(np.int32)
    chunks = tuple(Chunk(str(row), tokens[row], sizes.context - 1, pages_of_row[row], GREEDY) for row in range(batch))
    return stack([Plan(decode=chunks)], engine, batch, 0)


def prefill_inputs(sizes: Sizes, engine: EngineConfig, rng: np.random.Generator) -> StepInputs:
    """One prompt, in one step, beside an empty decode row."""
    tokens = rng.integers(0, sizes.model.vocab_size, sizes.prefill_tokens).astype(np.int32)
    tiles = -(-len(tokens) // engine.tile)
    pages = rng.permutation(engine.num_pages)[: -(-len(tokens) // engine.page_size)].astype(np.int32)
    return stack([Plan(prefill=(Chunk("prompt", tokens, 0, pages, GREEDY),), tiles=tiles)], engine, 1, tiles)


def time_steps(
    run: Any, weights: nnx.State, state: DeviceState, slots_LE: jax.Array, inputs: StepInputs, samples: int
) -> tuple[dict[str, Any], DeviceState]:
    """``step``: as the server does it, from host arrays to tokens on the host. ``back_to_back``: steps that do not wait
    for the host, ten a sample, which hides the time of dispatch where it is the shorter one."""
    for _ in range(2):  # to warm up
        outputs, state = run(weights, state, slots_LE, inputs)
    before_STLE = np.asarray(state.counts_STLE)
    outputs, state = jax.block_until_ready(run(weights, state, slots_LE, inputs))
    hit_L = (np.asarray(state.counts_STLE) - before_STLE).sum(axis=(0, 1)).astype(bool).sum(axis=1)
    alone, chained = [], []
    for _ in range(samples):
        began = time.perf_counter()
        outputs, state = run(weights, state, slots_LE, inputs)
        np.asarray(outputs.token_SG)
        alone.append(time.perf_counter() - began)
    for _ in range(max(samples // 5, 1)):
        jax.block_until_ready(state)
        began = time.perf_counter()
        for _ in range(10):
            outputs, state = run(weights, state, slots_LE, inputs)
        jax.block_until_ready(state)
        chained.append(time.perf_counter() - began)
    return {
        "step": timing(alone),
        "back_to_back": timing(chained, calls=10),
        "experts_hit_per_layer": float(hit_L.mean()),
        "experts_hit_L": hit_L,
    }, state


def touched_bytes(config: ModelConfig, abstract: Any, hit_L: np.ndarray) -> int:
    """Weights that a step reads: all but the embedding, of which it reads a few rows, and the experts of no token."""
    whole = nbytes(abstract) - (0 if config.tie_embeddings else nbytes(abstract["embed"]))
    mlps: list[Mapping[str, Any]] = [abstract["layers"][layer]["mlp"] for layer in config.moe_layers]
    expert_bytes = nbytes([mlps[0]["gate_up"], mlps[0]["down"]]) // config.num_experts
    return whole - expert_bytes * int((config.num_experts - hit_L).sum())


def kv_token_bytes(config: ModelConfig) -> int:
    return 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim


def nbytes(tree: Any) -> int:
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
