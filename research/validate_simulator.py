"""The simulator compared with the real server: the latencies of the same arrivals through both.

A closed loop of many clients first measures the server's capacity. Each repetition at each load then has three parts:
closed loops of more and more clients keep the server busy, requests arrive at a share of the capacity, and the closed
loops run again. The steps of the loops before and after give the costs (``research.measured_costs``) for the simulated
server, which gets the same arrivals. Nothing is fitted to the run that is compared.

Run it on a quiet machine. ``drift`` is the time of that run's steps over the cost of the same steps in the loops, which
no simulator can know. The ratios ``at its speed`` are those of a second simulation with all costs times ``drift``, so
they show the simulator's own error.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from operator import attrgetter
from statistics import median
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from gimbal_jax.bench.measurement import Summary, summarise
from gimbal_jax.cli.terminal import console, print_table, progress_bar
from gimbal_jax.config import ModelConfig
from gimbal_jax.model.demo_model import TOPICS
from gimbal_jax.serving.core.core import EngineCore
from gimbal_jax.serving.runtime.device_runner import DeviceRunner
from gimbal_jax.simulation.routing import BALANCED, Router, synthetic_router
from gimbal_jax.simulation.simulate import Run, Testbed, simulate
from gimbal_jax.simulation.systems import System
from gimbal_jax.simulation.workload import WorkloadConfig, make_workload
from research.cpu_clients import Call, call_of, closed_loop, demo_encode, open_loop, running, scaled
from research.cpu_engine import CONFIG, demo_runner, use_cpu_devices
from research.measured_costs import MeasuredCosts, MeasuredStep
from research.store import OUT
from research.timed_runner import TimedRunner

LOADS = 0.5, 0.7, 0.85
CLIENTS = 2, 8, 32, 128
"""Clients of the closed loops; the last ones fill all rows."""
CAPACITY_S, CALIBRATION_S = 12.0, 3.0
SYSTEM = System(
    "validated", "what the server does by default; experts stay", CONFIG.dispatch, CONFIG.queue, CONFIG.placement
)
OTHER_SEED = 1000
"""Added to the seed of the calibration, so that it sends other requests than the compared run."""
TARGET = 0.15
"""Largest relative error of mean TTFT and TPOT that counts as close."""


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
    """Time of the real run's steps relative to their price."""
    outside: int
    """Simulated steps whose price is extrapolated."""


def main(
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of arrivals in each repetition.")] = 7.0,
    repetitions: Annotated[int, typer.Option(min=1, help="Repetitions at each load.")] = 5,
) -> None:
    """Compare mean TTFT and TPOT, measured and simulated, at three loads."""
    use_cpu_devices()
    with progress_bar("compiling") as progress:
        model, runner = demo_runner(CONFIG, 1, progress)
    with running(EngineCore(model, CONFIG, runner)) as server:
        capacity = closed_loop(server, other_calls(new_router(model, 0), 0), CLIENTS[-1], CAPACITY_S)
    comparisons: list[Comparison] = []
    with progress_bar("comparing") as progress:
        for seed, load in product(range(repetitions), LOADS):
            progress(len(comparisons), repetitions * len(LOADS))
            comparisons.append(compare(model, runner, load, capacity, seconds, seed))
    print_table(table(comparisons))
    console.print(f"capacity {capacity:.1f} requests/s; close: simulated over real within {TARGET:.0%} of 1")
    path = OUT / "validate_simulator.json"
    path.write_text(json.dumps([asdict(comparison) for comparison in comparisons], indent=1))
    console.print(f"all numbers: {path}")


def new_router(model: ModelConfig, seed: int) -> Router:
    """Return a router that knows the topics; measured prices do not depend on how tokens route."""
    routing = replace(BALANCED, topics=len(TOPICS))
    return synthetic_router(routing, len(model.moe_layers), model.num_experts, model.experts_per_token, seed)


def other_calls(router: Router, seed: int) -> list[Call]:
    """Return requests for the closed loops, other ones than those of the compared run."""
    arrivals = scaled(make_workload(WorkloadConfig(requests=1000), router, seed + OTHER_SEED))
    encode, rng = demo_encode(), np.random.default_rng(seed + OTHER_SEED)
    return [call_of(arrival, encode, rng) for arrival in arrivals]


def compare(
    model: ModelConfig, runner: DeviceRunner, load: float, capacity: float, seconds: float, seed: int
) -> Comparison:
    """Run one repetition; ``capacity`` is in requests/s."""
    encode, rng, router = demo_encode(), np.random.default_rng(seed), new_router(model, seed)
    timed, others = TimedRunner(runner, time.monotonic), other_calls(router, seed)
    before = busy_steps(model, timed, others)
    rate = load * capacity
    workload = WorkloadConfig(requests=max(1, round(rate * seconds)), rate=rate)
    arrivals = scaled(make_workload(workload, router, seed))
    with running(EngineCore(model, CONFIG, timed)) as server:
        seen = open_loop(server, [call_of(arrival, encode, rng) for arrival in arrivals])
    sent = [replace(arrival, time_s=m.arrival_s) for arrival, m in zip(arrivals, seen, strict=True)]
    sent.sort(key=lambda arrival: arrival.time_s)
    own = timed.take_steps()
    steps = before + busy_steps(model, timed, others)

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


def busy_steps(model: ModelConfig, runner: TimedRunner, calls: Sequence[Call]) -> list[MeasuredStep]:
    """Return the steps of a server that clients keep busy."""
    steps = []
    for clients in CLIENTS:
        with running(EngineCore(model, CONFIG, runner)) as server:
            closed_loop(server, calls, clients, CALIBRATION_S / len(CLIENTS))
        own = runner.take_steps()
        steps += own[len(own) // 4 :]  # the first ones after a start are slow
    return steps


def table(comparisons: Sequence[Comparison]) -> Table:
    """Return two rows per load, with medians over its repetitions."""
    result = Table(title="Simulated over real: medians of repetitions")
    for name in ("load", "", "real (ms)", "ratio", "at its speed", "drift", "verdict"):
        result.add_column(name, justify="right")
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
