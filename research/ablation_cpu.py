"""The paper's ablation (figure 12) on the real server, small: two engines on two CPU devices of one thread each.

Every run replays a resampled trace, in this process, on one compiled runner: dp 2, tp 1, the padded sparse exchange.
Most of the model's time goes to its experts, so the fuller rank sets the pace. Each pair of load and seed has its own
requests. The systems take turns on them, with another one first each time, so that drift of the machine affects all
alike. Windows are short because a run has only a few hundred steps.
Finished runs are kept in out/ablation_cpu.jsonl and not run again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from matplotlib.figure import Figure
from rich.table import Table

from gimbal_jax.bench.measurement import summarise
from gimbal_jax.cli.terminal import console, print_table, progress_bar
from gimbal_jax.config import ModelConfig, ServerConfig
from gimbal_jax.model.demo_model import TOPICS
from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.scheduler.traffic import imbalance_L
from gimbal_jax.serving.core.core import EngineCore
from gimbal_jax.serving.placement.rebalance import Rebalancer, apply_placement
from gimbal_jax.simulation.routing import RoutingConfig, synthetic_router
from gimbal_jax.simulation.systems import SYSTEMS, System
from gimbal_jax.simulation.workload import Arrival, WorkloadConfig, make_workload
from research.comparison import Estimate, estimate
from research.cpu_clients import call_of, closed_loop, demo_encode, open_loop, running, scaled
from research.cpu_engine import CONFIG, demo_runner, use_cpu_devices
from research.plots import bar, colour, plain
from research.store import OUT, ResultStore
from research.timed_runner import TimedRunner

ABLATION = "vllm", "gimbal_dp", "gimbal_ep", "gimbal_no_collab", "gimbal"
LOADS = 0.9, 0.75, 0.6
"""Shares of the capacity, which is measured first."""
EXPERT_WIDTH = 8
WINDOW_STEPS = 100
TREND = 0.5
"""Half of the requests are on one topic, the rest on any of eight."""
CAPACITY_CLIENTS, CAPACITY_S = 128, 20.0
PAPER = {
    "gimbal_dp": (0.749, 0.866),
    "gimbal_ep": (0.738, 0.773),
    "gimbal_no_collab": (0.702, 0.727),
    "gimbal": (0.586, 0.680),
}
"""TTFT and TPOT over vLLM's (section 7.4)."""
BASE = replace(CONFIG, engine=replace(CONFIG.engine, exchange="sparse"))


@dataclass(frozen=True)
class CapacityRun:
    """A closed loop on static experts, which measures how many requests per second the server sustains."""

    clients: int
    seconds: float
    expert_width: int


@dataclass(frozen=True)
class AblationRun:
    """One system under one load."""

    system: str
    load: float
    requests_per_s: float
    seed: int
    seconds: float
    window_steps: int
    trend: float
    expert_width: int


class AtOnce(Executor):
    """An executor that decides while the engines wait, as vLLM's EPLB did at the time of the paper."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each load.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of arrivals in each run.")] = 20.0,
) -> None:
    """Measure TTFT and TPOT of the five systems of the ablation, relative to vLLM, on the real server."""
    use_cpu_devices()
    results = OUT / "ablation_cpu.jsonl"
    store = ResultStore(results)
    with progress_bar("compiling") as progress:
        model, runner = demo_runner(BASE, EXPERT_WIDTH, progress)
    watched = TimedRunner(runner, time.monotonic)
    capacity = CapacityRun(CAPACITY_CLIENTS, CAPACITY_S, EXPERT_WIDTH)
    if capacity not in store:
        store.add(capacity, {"requests_per_s": measured_capacity(model, watched, capacity)})
    runs = plan_runs(LOADS, seeds, seconds, store[capacity]["requests_per_s"])
    with progress_bar("runs") as progress:
        for number, run in enumerate(runs):
            progress(number, len(runs))
            if run not in store:
                store.add(run, execute(model, watched, run))
    normalised = {system: compared(store, runs, system) for system in ABLATION}
    print_table(table(store, runs, normalised))
    picture = results.with_suffix(".png")
    draw(normalised, picture)
    console.print(f"picture: {picture}, all runs: {results}")


def plan_runs(loads: Sequence[float], seeds: int, seconds: float, capacity: float) -> list[AblationRun]:
    """Return all runs: for each pair of load and seed every system, with another one first each time."""
    runs = []
    for pair, (seed, load) in enumerate(product(range(seeds), loads)):
        first = pair % len(ABLATION)
        for system in ABLATION[first:] + ABLATION[:first]:
            runs.append(AblationRun(system, load, load * capacity, seed, seconds, WINDOW_STEPS, TREND, EXPERT_WIDTH))
    return runs


def arrivals_of(model: ModelConfig, requests: int, requests_per_s: float, seed: int) -> list[Arrival]:
    routing = RoutingConfig(topics=len(TOPICS), trend=TREND)
    router = synthetic_router(routing, len(model.moe_layers), model.num_experts, model.experts_per_token, seed)
    return scaled(make_workload(WorkloadConfig(requests=requests, rate=requests_per_s), router, seed))


def measured_capacity(model: ModelConfig, runner: TimedRunner, run: CapacityRun) -> float:
    """Return the requests per second that the server answers if many clients keep it busy."""
    encode, rng = demo_encode(), np.random.default_rng(0)
    calls = [call_of(arrival, encode, rng) for arrival in arrivals_of(model, 1000, 1.0, seed=10**6)]
    with running(EngineCore(model, BASE, runner)) as server:
        return closed_loop(server, calls, run.clients, run.seconds)


def execute(model: ModelConfig, runner: TimedRunner, run: AblationRun) -> dict[str, Any]:
    """Serve the requests of a run, from the contiguous placement on; return its measurements for the store."""
    config = server_config(SYSTEMS[run.system], run.window_steps)
    ranks, encode = config.mesh.ranks, demo_encode()
    seed = run.seed * len(LOADS) + LOADS.index(run.load)
    rng = np.random.default_rng(seed)
    arrivals = arrivals_of(model, max(1, round(run.requests_per_s * run.seconds)), run.requests_per_s, seed)
    calls = [call_of(arrival, encode, rng) for arrival in arrivals]
    apply_placement(runner, static_placement(len(model.moe_layers), model.num_experts, ranks), config)
    runner.begin_counts()()
    runner.take_steps()
    runner.take_traffic()
    executor = AtOnce() if SYSTEMS[run.system].migration == "blocking" else None
    rebalancer = Rebalancer(model, config, runner, executor)
    with running(EngineCore(model, config, runner, rebalancer)) as server:
        seen = open_loop(server, calls)
        status = server.status()
    traffic = [portion for portion in runner.take_traffic() if portion.counts_LSE.any()]
    tokens = [int(portion.counts_LSE.sum()) for portion in traffic]
    uneven = [imbalance_L(t.counts_LSE, t.slot_of_expert_LE, ranks).mean() for t in traffic]
    return {
        "clients": asdict(summarise(seen)),
        "imbalance": float(np.average(uneven, weights=tokens)),
        "experts_moved": status.placement.totals.experts_moved,
        "steps": status.steps.count,
        "step_s": sum(step.seconds for step in runner.take_steps()),
    }


def server_config(system: System, window_steps: int) -> ServerConfig:
    """Return a configuration with short windows. If the system stops its engines for moves, they move together."""
    placement = replace(system.placement, window_steps=window_steps)
    if system.migration == "blocking":
        placement = replace(placement, migrate_bytes_per_tick=2**63)
    return replace(BASE, dispatch=system.dispatch, queue=system.queue, placement=placement)


def compared(store: ResultStore, runs: Sequence[AblationRun], system: str) -> tuple[Estimate, Estimate]:
    """Return TTFT and TPOT relative to vLLM's on the same requests, over all pairs of load and seed."""
    ttft, tpot = [], []
    for run in runs:
        if run.system == system:
            own, vllm = (store[replace(run, system=name)]["clients"] for name in (system, "vllm"))
            ttft.append(own["ttft_mean_s"] / vllm["ttft_mean_s"])
            tpot.append(own["tpot_mean_s"] / vllm["tpot_mean_s"])
    return estimate(ttft), estimate(tpot)


def table(store: ResultStore, runs: Sequence[AblationRun], normalised: dict[str, tuple[Estimate, Estimate]]) -> Table:
    """Return a row for each system."""
    result = Table(title="Real server, 2 CPU devices: means over vllm's, 95 % intervals")
    for name in ("system", "TTFT", "TPOT", "step (ms)", "imbalance", "moved"):
        result.add_column(name, justify="right")
    for system, (ttft, tpot) in normalised.items():
        own = [store[run] for run in runs if run.system == system]
        result.add_row(
            system,
            interval(ttft),
            interval(tpot),
            f"{np.mean([1e3 * r['step_s'] / r['steps'] for r in own]):.1f}",
            f"{np.mean([r['imbalance'] for r in own]):.3f}",
            f"{np.mean([r['experts_moved'] for r in own]):.0f}",
        )
    return result


def interval(found: Estimate) -> str:
    return f"{found.mean:.2f} {found.low:.2f}-{found.high:.2f}"


def draw(normalised: dict[str, tuple[Estimate, Estimate]], path: Path) -> None:
    """Draw bars as in the paper's figure 12, with the paper's values as dashes."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    for measure, axes in enumerate(figure.subplots(1, 2, sharey=True)):
        for place, (system, estimates) in enumerate(normalised.items()):
            bar(axes, place, estimates[measure], 0.0, colour(system))
            if system in PAPER:
                axes.hlines(PAPER[system][measure], place - 0.4, place + 0.4, color="black", linestyle="--")
        axes.set_xticks(range(len(normalised)), [system.replace("gimbal_", "gimbal\n") for system in normalised])
        axes.set_title(f"Normalised {('TTFT', 'TPOT')[measure]}")
        plain(axes)
    figure.suptitle("Ablation on the real server, 2 CPU devices (bars, 95 % intervals); the paper on 4 H100 (dashes)")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    typer.run(main)
