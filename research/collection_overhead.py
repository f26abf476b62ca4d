"""The cost of collecting the source-by-expert matrix (figure 13), on this CPU.

    none      nothing is collected
    separate  another pass after routing maps every chosen slot back to its expert and sums one-hot rows
    fused     ours: routing counts as it goes

Measured for the routing operation alone, with the router's shape of Qwen3-30B-A3B, and for the whole step of the demo
model. The exchange needs the position of every pair among those of its slot, and the step needs the counts per slot,
with or without collection; ``slots`` (operation only) leaves out even that. All variants take turns.
``python -m benchmarks.device.check`` measures it on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import typer
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.table import Table

from benchmarks.device.timing import Timed, time_together
from benchmarks.plans import greedy_rows
from gimbal_jax.cli.terminal import console, print_table
from gimbal_jax.config import EngineConfig
from gimbal_jax.model import transformer
from gimbal_jax.model.inputs import RareInputs, StepShape, step_shape
from gimbal_jax.model.moe import moe_exchange
from gimbal_jax.model.step import COMPILER_OPTIONS, DeviceState, abstract_model, new_state, put_by_engine, step
from gimbal_jax.model.transformer import StepLayout
from gimbal_jax.pallas_kernels.route_and_count import Routing, route_and_count
from gimbal_jax.serving.engine.plan import Chunk, Plan
from gimbal_jax.serving.engine.request import SamplingParams
from gimbal_jax.serving.runtime.batch import default_rare_inputs, pack_step
from research.cpu_engine import CONFIG, demo_weights_on, use_cpu_devices
from research.plots import plain
from research.store import OUT

EXPERTS, K = 128, 8
"""Experts and choices of Qwen3-30B-A3B."""
TOKENS = 64, 512, 2048
STEPS = {"decode": (32, 0), "prefill": (8, 248)}
"""Decode rows and prefill tokens of each engine."""

COLOURS = {"slots": "#97bbf5", "none": "#4269d0", "separate": "#ff725c", "fused": "#3ca951"}

Medians = Mapping[str, float]
"""Microseconds by variant."""


def main(
    samples: Annotated[int, typer.Option(min=3, help="Samples of each variant and size.")] = 30,
) -> None:
    """Measure the latency of routing and of a step, by how the matrix is collected."""
    use_cpu_devices()
    operations = {f"{tokens} tokens": time_operation(tokens, samples) for tokens in TOKENS}
    steps = time_steps(samples)
    found = {"Routing operation": operations, "Whole step of the demo model": steps}
    for title, medians in found.items():
        print_table(table(title, medians))
    draw(found, OUT / "fig13_collection.png")
    console.print(f"picture: {OUT / 'fig13_collection.png'}")


def count_in_a_pass(slot_Tk: jax.Array, slot_of_expert_E: jax.Array) -> jax.Array:
    """Count the tokens of each expert from their slots, as a collector outside of the routing does."""
    slot_Tk = jax.lax.optimization_barrier(slot_Tk)  # or XLA would make one pass of both
    experts = len(slot_of_expert_E)
    expert_of_slot_P = jnp.zeros(experts, jnp.int32).at[slot_of_expert_E].set(jnp.arange(experts))
    expert_Tk = jnp.where(slot_Tk >= 0, expert_of_slot_P[slot_Tk], -1)
    return jax.nn.one_hot(expert_Tk, experts, dtype=jnp.int32).sum(axis=(0, 1))


def time_operation(tokens: int, samples: int) -> Medians:
    route = partial(route_and_count, k=K, renormalise=True, ranks=4)

    def slots(*args: jax.Array) -> Any:
        routing = route(*args)
        return routing.slot_Tk, routing.weight_Tk

    def none(*args: jax.Array) -> Any:
        return route(*args)._asdict() | {"count_E": None}

    def separate(logits_TE: jax.Array, valid_T: jax.Array, slot_of_expert_E: jax.Array) -> Any:
        routing = route(logits_TE, valid_T, slot_of_expert_E)
        return routing._replace(count_E=count_in_a_pass(routing.slot_Tk, slot_of_expert_E))

    def make(key: jax.Array) -> tuple[list[tuple[Any, ...]], tuple[Any, ...]]:
        sets = [(logits_TE,) for logits_TE in jax.random.normal(key, (4, tokens, EXPERTS))]
        return sets, (jnp.ones(tokens, bool), jax.random.permutation(key, EXPERTS).astype(jnp.int32))

    variants: dict[str, Callable[..., Any]] = {"slots": slots, "none": none, "separate": separate, "fused": route}
    cases = [Timed(name, op, make, {}) for name, op in variants.items()]
    times = time_together(cases, jax.random.key(0), samples, rounds=max(1, 512 // tokens))
    return {case.name: found["median_us"] for case, found in zip(cases, times, strict=True)}


class SeparatePass:
    """Routing and exchange of a model whose counts come from another pass; the exchange uses those of the routing."""

    def route(self, logits_TE: jax.Array, valid_T: jax.Array, slot_of_expert_E: jax.Array, **how: Any) -> Routing:
        self._routing = route_and_count(logits_TE, valid_T, slot_of_expert_E, **how)
        return self._routing._replace(count_E=count_in_a_pass(self._routing.slot_Tk, slot_of_expert_E))

    def exchange(self, form: Any, x_tD: jax.Array, routing: Routing, *rest: Any) -> jax.Array:
        return moe_exchange(form, x_tD, self._routing, *rest)


def time_steps(samples: int) -> dict[str, Medians]:
    model, mesh, weights, slot_of_expert_LE = demo_weights_on(CONFIG.mesh)
    graph, _ = abstract_model(model, "float32", mesh)
    layout = StepLayout(mesh, CONFIG.engine.tile, "sparse", "xla")

    def fused(shape: StepShape, *args: Any) -> Any:
        return step(graph, layout, shape, *args)

    def none(shape: StepShape, weights: Any, state: DeviceState, *args: Any) -> Any:
        outputs, after = step(graph, layout, shape, weights, state, *args)
        return outputs, replace(after, counts_STLE=state.counts_STLE)

    one_pass = SeparatePass()
    state = new_state(model, CONFIG.engine, "float32", mesh)
    unasked = put_by_engine(default_rare_inputs(CONFIG.engine, model.vocab_size, CONFIG.mesh.dp), mesh)
    medians: dict[str, Medians] = {}
    for name, (rows, tokens) in STEPS.items():
        shape, packed_SX = step_inputs(CONFIG.engine, rows, tokens, unasked)
        args = weights, state, jnp.asarray(slot_of_expert_LE), packed_SX, unasked
        programs = {"none": compiled(partial(none, shape), *args)}
        with patch.multiple(transformer, route_and_count=one_pass.route, moe_exchange=one_pass.exchange):
            programs["separate"] = compiled(partial(fused, shape), *args)
        programs["fused"] = compiled(partial(fused, shape), *args)
        seconds: dict[str, list[float]] = {variant: [] for variant in programs}
        for sample in range(-2, samples):  # two to warm up
            for variant, program in programs.items():
                began = time.perf_counter()
                _, state = jax.block_until_ready(program(weights, state, *args[2:]))
                if sample >= 0:
                    seconds[variant].append(time.perf_counter() - began)
        medians[name] = {variant: 1e6 * median(found) for variant, found in seconds.items()}
    return medians


def compiled(run: Callable[..., Any], *args: Any) -> jax.stages.Compiled:
    jax.clear_caches()  # layers are traced once for all programs, patched or not
    return jax.jit(run, donate_argnums=1).lower(*args).compile(COMPILER_OPTIONS)


def step_inputs(engine: EngineConfig, rows: int, tokens: int, unasked: RareInputs) -> tuple[StepShape, np.ndarray]:
    """Return a step with ``rows`` decode rows and ``tokens`` prefill tokens on every engine."""
    rng, sampling = np.random.default_rng(0), SamplingParams(1, temperature=0.0)

    def token_ids(count: int) -> np.ndarray:
        return rng.integers(1000, 1700, count).astype(np.int32)

    pages_DM = 8 * np.arange(rows, dtype=np.int32)[:, None] + np.arange(-(-65 // engine.page_size), dtype=np.int32)
    decode = greedy_rows(token_ids(rows), np.full(rows, 64, np.int32), pages_DM)
    pages = np.arange(8 * rows, 8 * rows + -(-tokens // engine.page_size), dtype=np.int32)
    prefill = (Chunk(rows, token_ids(tokens), 0, pages, sampling),) if tokens else ()
    shape = step_shape(engine, (rows, tiles := -(-tokens // engine.tile)))
    packed_SX, _ = pack_step([Plan(decode, prefill, tiles)] * CONFIG.mesh.dp, shape, unasked)
    return shape, packed_SX


def table(title: str, found: Mapping[str, Medians]) -> Table:
    """Return the microseconds by size and variant, also relative to those without collection."""
    result = Table(title=f"{title}: median us (over none)")
    variants = list(next(iter(found.values())))
    for name in ("size", *variants):
        result.add_column(name, justify="right")
    for size, medians in found.items():
        cells = (f"{medians[name]:,.0f} ({medians[name] / medians['none']:.2f})" for name in variants)
        result.add_row(size, *cells)
    return result


def draw(parts: Mapping[str, Mapping[str, Medians]], path: Path) -> None:
    """Draw bars of each variant relative to ``none``, one group per size."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    width = 0.8 / len(COLOURS)
    for axes, (title, found) in zip(figure.subplots(1, len(parts)), parts.items(), strict=True):
        for size, medians in enumerate(found.values()):
            for number, (variant, colour) in enumerate(COLOURS.items()):
                if variant in medians:
                    place = size + (number - (len(COLOURS) - 1) / 2) * width
                    bar = axes.bar(place, medians[variant] / medians["none"], width, color=colour)
                    axes.bar_label(bar, [f"{medians[variant]:,.0f}"], fontsize=7)
        axes.set_xticks(range(len(found)), list(found))
        axes.set_title(f"{title} (labels: microseconds)", fontsize=10)
        plain(axes)
        axes.set_ylabel("latency over none")
    handles = [Patch(color=colour, label=variant) for variant, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle("Collecting the source-by-expert matrix, measured on this CPU")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    typer.run(main)
