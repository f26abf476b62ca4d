"""Measure the time of a step on the devices, by bucket, and of its parts alone, with random tokens.

    python -m benchmarks.step CHECKPOINT --out out/bench_step.json

All work is timed alternately, round by round, so that other load of the host affects all of it equally. Wall-clock
seconds are the time that a server waits. CPU seconds divided by the number of CPUs depend less on other processes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.plans import greedy_rows
from gimbal_jax.cli.serve.options import DEVICES_HELP
from gimbal_jax.cli.terminal import progress_bar
from gimbal_jax.config import EngineConfig, MeshConfig, ModelConfig, ServerConfig
from gimbal_jax.model.hf_config import load_config
from gimbal_jax.model.loading import weights_dtype_on_cpu
from gimbal_jax.model.step import COMPILER_OPTIONS
from gimbal_jax.pallas_kernels import grouped_ffn, paged_attention, product
from gimbal_jax.serving.engine.plan import Chunk, Plan
from gimbal_jax.serving.runtime.device_runner import DeviceRunner
from gimbal_jax.serving.runtime.devices import load_on_mesh, set_up_devices

Work = Callable[[], object]
console = Console(width=150)


def plan_of(rows: int, tiles: int, context: int, prompt: int, vocab_size: int, engine: EngineConfig) -> Plan:
    """Return a plan of prompts that fill ``tiles`` tiles, and of at most ``rows`` sequences that decode.

    Each decoding sequence has ``context`` tokens in its KV cache. Prompts take rows first.
    """
    rng = np.random.default_rng(0)
    pages = iter(rng.permutation(engine.num_pages).astype(np.int32))

    def pages_of(tokens: int) -> np.ndarray:
        return np.fromiter(pages, np.int32, -(-tokens // engine.page_size))

    prefill, left = [], tiles * engine.tile
    while left > 0:
        tokens = rng.integers(vocab_size, size=min(prompt, left)).astype(np.int32)
        prefill.append(Chunk(engine.max_rows, tokens, 0, pages_of(len(tokens)), None))
        left -= -(-len(tokens) // engine.tile) * engine.tile
    rows = min(rows, engine.max_rows - len(prefill))
    table_DM = np.zeros((rows, engine.pages_per_row), np.int32)
    for row in range(rows):
        used = pages_of(context + 1)
        table_DM[row, : len(used)] = used
    tokens_D = rng.integers(vocab_size, size=rows).astype(np.int32)
    decode = greedy_rows(tokens_D, np.full(rows, context, np.int32), table_DM)
    return Plan(decode, tuple(prefill), tiles)


def step_of(runner: DeviceRunner, plan: Plan) -> Work:
    plans = [plan] * runner.config.mesh.dp

    def work() -> object:
        return runner.enqueue(plans, lambda name: None)()

    return work


def in_all_layers(function: Callable[..., jax.Array], x: jax.Array, layers: Sequence[Any]) -> Work:
    """Compile a program that applies ``function`` layer by layer, to the last layer's result and the layer's arrays."""

    def run(x: jax.Array, layers: Sequence[Any]) -> jax.Array:
        for layer in layers:
            x = jax.lax.optimization_barrier(function(x, *layer))
        return x

    compiled = jax.jit(run).lower(x, layers).compile(COMPILER_OPTIONS)
    return lambda: jax.block_until_ready(compiled(x, layers))


def experts_of(model: ModelConfig, weights: Any, tokens: int) -> Work:
    """Return the work of the experts of all layers, with uniformly random routing."""
    rng, k = np.random.default_rng(0), model.experts_per_token
    slot_n = np.argsort(rng.random((tokens, model.num_experts)))[:, :k].reshape(-1)
    place_n = np.empty(tokens * k, np.int32)
    place_n[np.argsort(slot_n, kind="stable")] = np.arange(tokens * k)
    size_P = np.bincount(slot_n, minlength=model.num_experts).astype(np.int32)
    weight_Nk = np.full((tokens, k), 1 / k, np.float32)
    mlps = [weights["layers"][layer]["mlp"] for layer in model.moe_layers]
    routed = tuple(map(jnp.asarray, (place_n.reshape(tokens, k), weight_Nk, size_P)))
    layers = [(*routed, *(mlp[name].get_value() for name in ("gate_up", "down"))) for mlp in mlps]
    x_ND = jnp.asarray(rng.normal(size=(tokens, model.hidden_size)), model.dtype)
    return in_all_layers(grouped_ffn, x_ND, layers)


def attention_of(model: ModelConfig, engine: EngineConfig, dtype: Any, queries: int, start_G: np.ndarray) -> Work:
    """Return the attention work of all layers.

    Args:
        queries: Tokens of each group.
        start_G: Position of the first token of each group. Every group has its own row of KV pages.
    """
    rng, groups = np.random.default_rng(0), len(start_G)
    pages = -(-int(start_G.max() + queries) // engine.page_size)
    table_GM = np.zeros((groups, engine.pages_per_row), np.int32)
    table_GM[:, :pages] = rng.integers(engine.num_pages, size=(groups, pages))
    pages_shape = (engine.num_pages, engine.page_size, model.num_kv_heads, model.head_dim)
    grouped = jnp.asarray(table_GM), jnp.asarray(start_G), jnp.full(groups, queries, jnp.int32)
    layers = [(jnp.ones(pages_shape, dtype), jnp.ones(pages_shape, dtype), *grouped) for _ in range(model.num_layers)]
    q_GQHD = jnp.asarray(rng.normal(size=(groups, queries, model.num_heads, model.head_dim)), dtype)
    return in_all_layers(paged_attention, q_GQHD, layers)


def head_of(model: ModelConfig, weights: Any, rows: int) -> Work:
    """Return the work that computes the logits of ``rows`` rows and the best token of each."""
    table_VD = weights["embed" if model.tie_embeddings else "head"].get_value()
    hidden_ND = jnp.asarray(np.random.default_rng(0).normal(size=(rows, model.hidden_size)), model.dtype)

    def head(hidden_ND: jax.Array, table_VD: jax.Array) -> jax.Array:
        return product("nd,vd->nv", hidden_ND, table_VD, jnp.float32).argmax(axis=-1)

    return in_all_layers(head, hidden_ND, [(table_VD,)])


def seconds_of(works: Mapping[str, Work], rounds: int) -> dict[str, dict[str, float]]:
    """Return the seconds of each work: "least" and "median" wall-clock, and "processors".

    "processors" is the least CPU time divided by the number of CPUs.
    """
    wall: dict[str, list[float]] = {name: [] for name in works}
    processors: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            began, used = time.perf_counter(), time.process_time()
            work()
            processors[name].append((time.process_time() - used) / len(os.sched_getaffinity(0)))
            wall[name].append(time.perf_counter() - began)
    # The first round is a warm-up and is ignored.
    return {
        name: {
            "least": min(wall[name][1:]),
            "median": float(np.median(wall[name][1:])),
            "processors": min(processors[name][1:]),
        }
        for name in works
    }


def main(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder.")],
    dp: Annotated[int, typer.Option(min=1)] = 1,
    tp: Annotated[int, typer.Option(min=1)] = 1,
    devices: Annotated[str, typer.Option(help=DEVICES_HELP)] = "cpu",
    dtype: Annotated[str, typer.Option(help="Type of hidden states and KV cache.")] = "float32",
    weights_dtype: Annotated[str, typer.Option(help="Type of weights; `auto`: as gimbal serve chooses.")] = "auto",
    tile: Annotated[int, typer.Option(min=2)] = EngineConfig.tile,
    budget: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = EngineConfig.token_budget,
    context: Annotated[int, typer.Option(min=0, help="Tokens in the KV cache of each decoding sequence.")] = 160,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    rounds: Annotated[int, typer.Option(min=1)] = 20,
    parts: Annotated[bool, typer.Option(help="Also time experts, attention and head alone (one device only).")] = True,
    out: Annotated[Path | None, typer.Option(help="JSON file for the seconds.")] = None,
) -> None:
    """Print the milliseconds of a full step in each bucket, and of its parts."""
    mesh_config = MeshConfig(dp, tp)
    available = set_up_devices(devices, mesh_config)
    if weights_dtype == "auto":
        weights_dtype = weights_dtype_on_cpu(folder, dtype)
    model = replace(load_config(folder), dtype=dtype, weights_dtype=weights_dtype)
    engine = EngineConfig(tile=tile, token_budget=budget, max_model_len=max(1024, context + 1, prompt))
    weights, slot_of_expert_LE, mesh = load_on_mesh(folder, model, mesh_config, available, weights_dtype)
    runner = DeviceRunner(model, ServerConfig(mesh_config, engine), mesh, weights, slot_of_expert_LE, dtype)
    with progress_bar("compiling") as progress:
        runner.warm_up(progress)
    works: dict[str, Work] = {}
    for rows, tiles in runner.buckets:
        plan = plan_of(rows, tiles, context, prompt, model.vocab_size, engine)
        works[f"step: {rows} rows, {tiles} tiles"] = step_of(runner, plan)
        tokens = rows + tiles * tile
        if parts and dp * tp == 1:
            works[f"experts of {tokens} tokens"] = experts_of(model, runner.weights, tokens)
            works[f"attention of {rows} rows"] = attention_of(model, engine, dtype, 1, np.full(rows, context, np.int32))
            works[f"head of {rows} rows"] = head_of(model, runner.weights, rows)
            if tiles:
                start_G = (np.arange(tiles, dtype=np.int32) % max(1, prompt // tile)) * tile
                works[f"attention of {tiles} tiles"] = attention_of(model, engine, dtype, tile, start_G)
    seconds = seconds_of(works, rounds)
    table = Table("work", "least ms", "median ms", "processors ms")
    for name, found in seconds.items():
        table.add_row(name, *(f"{1e3 * found[of]:.1f}" for of in ("least", "median", "processors")))
    console.print(table)
    if out is not None:
        setting = {"mesh": [dp, tp], "dtype": dtype, "tile": tile, "budget": budget}
        setting |= {"context": context, "prompt": prompt}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"setting": setting, "seconds": seconds}, indent=1))


if __name__ == "__main__":
    typer.run(main)
