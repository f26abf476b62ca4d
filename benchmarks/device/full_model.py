"""Check the server's step against plain XLA, and time it on a whole model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from benchmarks.device.numerics import rng_for
from benchmarks.device.parts import AbsentError, Result
from benchmarks.device.random_model import (
    RandomModel,
    Work,
    decode_work,
    engine_of,
    first_layers,
    layers_that_fit,
    nbytes,
    prefill_work,
    random_model,
)
from benchmarks.device.setting import Setting, Sizes
from benchmarks.device.timing import timing
from gimbal_jax.config import ModelConfig
from gimbal_jax.model.step import COMPILER_OPTIONS

CHECKED_LAYERS = 2
SHARED_TOP_IDS = 0.8
"""Minimum share of the likeliest tokens that kernels and plain XLA have in common.

In bfloat16 the order of close tokens may differ, and a token may choose another expert if two are close. A wrong step
has none in common.
"""


def check_model(setting: Setting) -> Iterator[Result]:
    """Check the first layers at full width: likeliest tokens of kernels and plain XLA, and exact expert counts."""
    if setting.backend == "xla":
        raise AbsentError("the kernels are compared with plain XLA, and this backend has no kernels")
    sizes = setting.sizes
    engine = engine_of(sizes)
    config = first_layers(sizes.model, CHECKED_LAYERS)
    for name, work in work_of(sizes, (max(sizes.batches),), rng_for(setting, "check_model")).items():
        work.parts.sampling.logprobs_SC[:] = 0
        ids_CK, counts_LE = {}, {}
        for backend in (setting.backend, "xla"):
            model = random_model(config, engine, setting.seed)
            outputs = model.run(model.lower(work, backend).compile(COMPILER_OPTIONS), work)
            assert outputs.logprobs is not None, "log probabilities were requested"
            ids_CK[backend] = np.asarray(outputs.logprobs.top_ids)[0][_chooses_C(work)]
            counts_LE[backend] = model.counts_LE()
            finite = bool(np.isfinite(np.asarray(outputs.logprobs.top_values)[0][_chooses_C(work)]).all())
        ours, plain = ids_CK[setting.backend], ids_CK["xla"]
        shared = float(np.mean([np.isin(one, other).mean() for one, other in zip(ours, plain, strict=True)]))
        counted = counts_LE[setting.backend].sum(axis=1)
        routed = int(work.parts.count_SG.sum()) * config.experts_per_token
        ok = shared >= SHARED_TOP_IDS and finite and bool((counted == routed).all())
        yield (
            name,
            {"ok": ok, "shared_top_ids": shared, "finite": finite, "routed": routed, "counted": counted.tolist()},
        )


def model_speed(setting: Setting) -> Iterator[Result]:
    """Time decode steps at several batch sizes, then a prefill step."""
    sizes = setting.sizes
    engine = engine_of(sizes)
    config = layers_that_fit(sizes.model, engine, (jax.devices()[0].memory_stats() or {}).get("bytes_limit"))
    model = random_model(config, engine, setting.seed)
    layers = {"layers": config.num_layers, "layers_of_the_whole": sizes.model.num_layers}
    yield "model", layers | {"weight_bytes": nbytes(model.weights), "kv_bytes": nbytes(model.state.pages)}

    work = work_of(sizes, sizes.batches, rng_for(setting, "model_speed"))
    began = time.perf_counter()
    lowered = [model.lower(one, setting.backend) for one in work.values()]
    with ThreadPoolExecutor(max_workers=4) as pool:  # XLA compiles outside the interpreter lock
        compiled = list(pool.map(lambda one: one.compile(COMPILER_OPTIONS), lowered))
    yield "compile", {"programs": len(compiled), "wall_s": time.perf_counter() - began}

    for (name, one), program in zip(work.items(), compiled, strict=True):
        yield name, time_steps(model, program, one, setting)


def work_of(sizes: Sizes, batches: tuple[int, ...], rng: np.random.Generator) -> dict[str, Work]:
    engine = engine_of(sizes)
    work = {f"decode {batch}": decode_work(sizes, engine, batch, rng) for batch in batches}
    return work | {f"prefill {sizes.prefill_tokens}": prefill_work(sizes, engine, rng)}


def time_steps(model: RandomModel, program: Any, work: Work, setting: Setting) -> dict[str, Any]:
    """Return two times of a step, and for a decode step its lower bound.

    ``step`` is timed as the server runs it, from host arrays to tokens on the host. ``back_to_back`` is the time per
    step of ten steps that do not wait for the host. It hides dispatch if dispatch takes less time than the device.
    ``weight_floor_us`` is the time to read the weights that the step touches, at the bytes/s of the triad.
    """
    for _ in range(2):  # warm up
        model.run(program, work)
    before_LE = model.counts_LE()
    model.run(program, work)
    hit_L = (model.counts_LE() - before_LE).astype(bool).sum(axis=1)
    alone, chained = [], []
    for _ in range(setting.sizes.samples):
        began = time.perf_counter()
        np.asarray(model.run(program, work).token_SC)
        alone.append(time.perf_counter() - began)
    for _ in range(setting.sizes.samples):
        began = time.perf_counter()
        for _ in range(10):
            model.run(program, work)
        jax.block_until_ready(model.state)
        chained.append(time.perf_counter() - began)

    step, back_to_back = timing(alone), timing(chained, calls=10)
    parts = work.parts
    end_SG = np.where(parts.count_SG > 0, parts.start_SG + parts.count_SG, 0)
    touched = touched_bytes(model, hit_L)
    found: dict[str, Any] = {
        "step": step,
        "back_to_back": back_to_back,
        "tokens_per_s": float(parts.count_SG.sum()) / step["median_us"] * 1e6,
        "experts_hit_per_layer": float(hit_L.mean()),
        "weight_bytes_touched": touched,
    }
    tb_per_s = setting.ceiling("triad", "tb_per_s")
    if tb_per_s and work.shape.tiles == 0:
        found["kv_bytes_read"] = int(end_SG.sum()) * kv_token_bytes(model.config)
        found["weight_floor_us"] = floor_us = touched / tb_per_s / 1e6
        found["floor_with_kv_us"] = floor_us + found["kv_bytes_read"] / tb_per_s / 1e6
        found["step_over_weight_floor"] = step["median_us"] / floor_us
        found["back_to_back_over_weight_floor"] = back_to_back["median_us"] / floor_us
    return found


def touched_bytes(model: RandomModel, hit_L: np.ndarray) -> int:
    """Return the bytes of weights that a step reads: all except the embedding and the experts without tokens."""
    config, weights = model.config, model.weights
    whole = nbytes(weights) - (0 if config.tie_embeddings else nbytes(weights["embed"]))
    mlp: Mapping[str, Any] = weights["layers"][config.moe_layers[0]]["mlp"]
    expert_bytes = nbytes([mlp["gate_up"], mlp["down"]]) // config.num_experts
    return whole - expert_bytes * int((config.num_experts - hit_L).sum())


def kv_token_bytes(config: ModelConfig) -> int:
    return 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim


def _chooses_C(work: Work) -> np.ndarray:
    """Return a mask of the sequences that choose a token. Results of the others have no meaning."""
    return np.asarray(work.parts.row_SC[0] < work.shape.max_rows)
