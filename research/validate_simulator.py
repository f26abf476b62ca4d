"""The simulator against the real server: the same arrivals through both, and what the clients of each saw.

First a closed loop of many clients tells the server's capacity. Then, for each load and repetition: closed loops of
more and more clients keep the server busy; requests arrive at a share of the capacity; and the closed loops once more.
The steps of the loops before and after give the costs (``simulation.measured_costs``) by which the simulated server
gets the same arrivals. Nothing is fitted to the run that is compared.

Run it on a quiet machine. ``drift`` is the time that the steps of that run took over what the very same steps cost in
the loops: what no simulator can know. The ratios ``at its speed`` are those of a second simulation with all costs times
``drift``: what is left is the simulator's own error.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from statistics import median
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gimbal_jax.bench.measurement import Summary, summarise
from gimbal_jax.config import ModelConfig
from gimbal_jax.model.demo_model import TOPICS
from gimbal_jax.serving.core.core import EngineCore
from gimbal_jax.serving.runtime.device_runner import DeviceRunner
from gimbal_jax.simulation.routing import BALANCED, Router, synthetic_router
from gimbal_jax.simulation.simulate import Run, Testbed, simulate
from gimbal_jax.simulation.systems import System
from gimbal_jax.simulation.workload import WorkloadConfig, make_workload
from research.cpu_clients import Call, call_of, closed_loop, demo_encode, open_loop, running, scaled
from research.cpu_engine import CONFIG, OUT, demo_runner, use_cpu_devices
from research.measured_costs import MeasuredCosts, MeasuredStep
from research.timed_runner import TimedRunner

LOADS = 0.5, 0.7, 0.85
CLIENTS = 2, 8, 32, 128
"""Of the closed loops; the last fill all rows."""
CAPACITY_S = 12.0
SYSTEM = System(
    "validated", "what the server does by default; experts stay", CONFIG.dispatch, CONFIG.queue, CONFIG.placement
)
OTHER_SEED = 1000
"""Calibration sends other requests than the runs that are compared."""
TARGET = 0.15
"""Mean TTFT and TPOT should be this close."""

console = Console()


@dataclass(frozen=True)
class Comparison:
    """One repetition at one load."""

    load: float
    """Share of the capacity."""
    requests_per_s: float
    real: Summary
    simulated: Summary
    at_its_speed: Summary
    """Simulated with all costs times ``drift``."""
    drift: float
    """Time of the real run's steps over their price."""
    outside: int
    """Simulated steps that were priced beyond what was measured."""


def main(
    seconds: Annotated[float, typer.Option(min=1, help="Of arrivals in each repetition.")] = 7.0,
    repetitions: Annotated[int, typer.Option(min=1)] = 5,
    calibration_s: Annotated[float, typer.Option(min=1, help="Of each calibration.")] = 3.0,
) -> None:
    """Mean TTFT and TPOT, measured and simulated, at three loads."""
    use_cpu_devices()
    with Progress(console=console) as progress:
        compiling = progress.add_task("compiling", total=None)
        model, runner = demo_runner(CONFIG, 1, lambda done, of: progress.update(compiling, completed=done, total=of))
        with running(EngineCore(model, CONFIG, runner)) as server:
            capacity = closed_loop(server, other_calls(new_router(model, 0), 0), CLIENTS[-1], CAPACITY_S)
        bar = progress.add_task("comparing", total=repetitions * len(LOADS))
        comparisons = []
        for seed in range(repetitions):
            for load in LOADS:
                comparisons.append(compare(model, runner, load, capacity, seconds, calibration_s, seed))
                progress.advance(bar)
    console.print(table(comparisons))
    console.print(f"capacity {capacity:.1f} requests/s; close: simulated over real within {TARGET:.0%} of 1")
    path = OUT / "validate_simulator.json"
    path.write_text(json.dumps([asdict(comparison) for comparison in comparisons], indent=1))
    console.print(f"all numbers: {path}", soft_wrap=True)


def new_router(model: ModelConfig, seed: int) -> Router:
    """Any router that knows the topics: measured prices do not depend on how tokens route."""
    routing = replace(BALANCED, topics=len(TOPICS))
    return synthetic_router(routing, len(model.moe_layers), model.num_experts, model.experts_per_token, seed)


def other_calls(router: Router, seed: int) -> list[Call]:
    """For the closed loops: not those of the run that is compared."""
    arrivals = scaled(make_workload(WorkloadConfig(requests=1000), router, seed + OTHER_SEED))
    encode, rng = demo_encode(), np.random.default_rng(seed + OTHER_SEED)
    return [call_of(arrival, encode, rng) for arrival in arrivals]


def compare(
    model: ModelConfig,
    runner: DeviceRunner,
    load: float,
    capacity: float,
    seconds: float,
    calibration_s: float,
    seed: int,
) -> Comparison:
    """One repetition: ``capacity`` in requests/s, times in seconds."""
    encode, rng, router = demo_encode(), np.random.default_rng(seed), new_router(model, seed)
    timed, others = TimedRunner(runner, time.monotonic), other_calls(router, seed)
    before = busy_steps(model, timed, others, calibration_s)
    rate = load * capacity
    workload = WorkloadConfig(requests=max(1, round(rate * seconds)), rate=rate)
    arrivals = scaled(make_workload(workload, router, seed))
    with running(EngineCore(model, CONFIG, timed)) as server:
        seen = open_loop(server, [call_of(arrival, encode, rng) for arrival in arrivals])
    sent = [replace(arrival, time_s=m.arrival_s) for arrival, m in zip(arrivals, seen, strict=True)]
    sent.sort(key=lambda arrival: arrival.time_s)
    own = timed.take_steps()
    steps = before + busy_steps(model, timed, others, calibration_s)

    def simulated(speed: float) -> Run:
        slowed = [replace(step, seconds=speed * step.seconds) for step in steps]
        costs = MeasuredCosts(slowed, runner.buckets, CONFIG.engine.tile)
        return simulate(SYSTEM, Testbed(model, CONFIG.mesh, CONFIG.engine), costs, router, sent, seed)

    prices = MeasuredCosts(steps, runner.buckets, CONFIG.engine.tile)
    drift = sum(step.seconds for step in own) / sum(prices.price(step.engines_S)["step"] for step in own)
    run = simulated(1.0)
    return Comparison(
        load, rate, summarise(seen), run.clients, simulated(drift).clients, drift, sum(run.outside.values())
    )


def busy_steps(model: ModelConfig, runner: TimedRunner, calls: Sequence[Call], seconds: float) -> list[MeasuredStep]:
    """Steps of a server that never rests."""
    steps = []
    for clients in CLIENTS:
        with running(EngineCore(model, CONFIG, runner)) as server:
            closed_loop(server, calls, clients, seconds / len(CLIENTS))
        own = runner.take_steps()
        steps += own[len(own) // 4 :]  # the first ones after a start are slow
    return steps


def table(comparisons: Sequence[Comparison]) -> Table:
    """Two rows for each load: medians over its repetitions."""
    result = Table(title="Simulated over real: medians of repetitions")
    for name in ("load", "", "real (ms)", "ratio", "at its speed", "drift", "verdict"):
        result.add_column(name, justify="right", no_wrap=True)
    for load in LOADS:
        own = [comparison for comparison in comparisons if comparison.load == load]
        for name in ("ttft", "tpot"):
            measure = attrgetter(f"{name}_mean_s")
            ratio = median(measure(c.simulated) / measure(c.real) for c in own)
            result.add_row(
                f"{load:.0%}",
                name.upper(),
                f"{median(1e3 * measure(c.real) for c in own):.1f}",
                f"{ratio:.2f}",
                f"{median(measure(c.at_its_speed) / measure(c.real) for c in own):.2f}",
                f"{median(c.drift for c in own):.2f}",
                "close" if abs(ratio - 1) <= TARGET else "not close",
                end_section=name == "tpot",
            )
    return result


if __name__ == "__main__":
    typer.run(main)
