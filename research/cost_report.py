"""Print prices of simulated steps on H100s and errors of predicted kernel times, or fit the ``paper_like`` sets."""

from __future__ import annotations

from typing import Annotated, get_args

import numpy as np
import typer
from rich.table import Column, Table

from gimbal_jax.cli.terminal import print_table
from gimbal_jax.config import Exchange, MeshConfig
from gimbal_jax.simulation.cost_sets import COST_SETS, CostSet
from gimbal_jax.simulation.costs import h100_costs, launch_seconds
from gimbal_jax.simulation.routing import Router, RoutingConfig, synthetic_router
from gimbal_jax.simulation.scenario import MODEL
from gimbal_jax.simulation.shapes import MEASURED
from gimbal_jax.simulation.work import EngineWork, StepWork
from research.fit import Constant, fit_to_paper
from research.prediction import prediction_errors

MESH = MeshConfig(dp=2, tp=2)
CONTEXT = 1024
DECODE_ROWS = (8, 32, 128, 256)
PREFILL_TOKENS = (512, 2048, 8192)


def errors_table() -> Table:
    names = "predicted", "points", "median", "p95", "worst"
    table = Table(*(Column(name, no_wrap=True) for name in names), title="Relative errors of predicted kernel times")
    for name, errors in prediction_errors().items():
        size = np.abs(errors)
        numbers = np.median(size), np.quantile(size, 0.95), size.max()
        table.add_row(name, str(len(size)), *(f"{number:.1%}" for number in numbers))
    return table


def steps_table(name: CostSet, exchange: Exchange, router: Router) -> Table:
    """Return typical steps by part. Both engines do equal work; the router is skewed, the placement contiguous."""
    costs = h100_costs(name, MODEL, MESH, exchange)
    steps = {f"decode {rows}": decode_step(rows, router) for rows in DECODE_ROWS}
    steps |= {f"prefill {tokens}": prefill_step(tokens, router) for tokens in PREFILL_TOKENS}
    parts = {step: costs.step_parts(work) for step, work in steps.items()}
    title = f"Steps of {MEASURED} on 4 H100s, DP 2, TP 2: {name} costs, {exchange} exchange"
    table = Table(*(Column(name, no_wrap=True) for name in ("ms", *steps)), title=title)
    for part in next(iter(parts.values())):
        table.add_row(part, *(f"{1e3 * of_step[part]:.2f}" for of_step in parts.values()))
    table.add_section()
    table.add_row("step", *(f"{1e3 * sum(of_step.values()):.2f}" for of_step in parts.values()))
    table.caption = "extrapolated: " + (", ".join(f"{op} {n}" for op, n in costs.outside.items()) or "nothing")
    return table


def decode_step(rows: int, router: Router) -> StepWork:
    """Return a step of ``rows`` decode rows over all engines, each with ``CONTEXT`` tokens in the cache."""
    each = rows // MESH.dp
    return routed(EngineWork(np.full(each, CONTEXT + 1), (), each), router)


def prefill_step(tokens: int, router: Router) -> StepWork:
    """Return a step of one prompt on each engine, ``tokens`` in total."""
    return routed(EngineWork(np.zeros(0, np.int64), ((0, tokens // MESH.dp),), 1), router)


def routed(engine: EngineWork, router: Router) -> StepWork:
    """Return a step with this work on every engine; its tokens are drawn from all topics."""
    rng = np.random.default_rng(0)
    source_B = np.repeat(np.arange(MESH.dp), engine.tokens)
    profile_B = rng.integers(2 * router.topics, size=len(source_B))
    return StepWork((engine,) * MESH.dp, router.count_tokens(profile_B, source_B, MESH.dp, rng), MESH.ranks)


def main(
    exchange: Annotated[str, typer.Option(help="Form of the exchange: gather or sparse.")] = "sparse",
    fit: Annotated[bool, typer.Option("--fit", help="Fit the paper_like sets again. Takes some minutes.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Runs that the fit averages over.")] = 3,
) -> None:
    """Print prediction errors and prices of typical steps, or fit the constants of the paper_like sets."""
    if exchange not in get_args(Exchange):
        raise typer.BadParameter(f"must be one of {', '.join(get_args(Exchange))}", param_hint="--exchange")
    form: Exchange = "gather" if exchange == "gather" else "sparse"
    if fit:
        for constant in get_args(Constant):
            result = fit_to_paper(constant, range(seeds), lambda x, latency_s: print(f"{x:.5g}: {latency_s:.2f} s"))
            print(result)
        return
    print_table(errors_table())
    print(f"Launching a kernel without CUDA graphs: {1e6 * launch_seconds():.1f} us")
    router = synthetic_router(RoutingConfig(), MODEL.num_layers, MODEL.num_experts, MODEL.experts_per_token, seed=0)
    for name in COST_SETS:
        print_table(steps_table(name, form, router))


if __name__ == "__main__":
    typer.run(main)
