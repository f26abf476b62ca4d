"""Measure how much placement decisions slow down ticks: decisions on a thread, in a process, and none.

The runner of the server sleeps during a step, as on GPUs, so that other threads can run. Decisions for 48 layers of 128
experts follow each other almost without a pause, far more often than in a real server. Rounds alternate, and ratios are
taken within a round. The host should be idle otherwise, because p99 is compared.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from statistics import median
from typing import Annotated, get_args

import numpy as np
import typer
from rich.table import Table

from benchmarks.tick import EXPERTS, LAYERS, MODEL, STEADY, TOP_K, Clients, InstantRunner, console
from gimbal_jax.config import GPU_ENGINE, MeshConfig, PlacementConfig, PlacementPolicy, ServerConfig
from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.scheduler.windows import WindowConfig, synthetic_windows
from gimbal_jax.serving.core.core import EngineCore
from gimbal_jax.serving.placement.process import PlacementProcess
from gimbal_jax.serving.placement.rebalance import Rebalancer

MESH = MeshConfig(2, 2)
ROWS = 64
NEVER = 10**9
LEAST = 5
"""Minimum number of decisions in a run with decisions. A busy host starves a process of low priority."""
EXECUTORS: Mapping[str, Callable[[], Executor]] = {
    "thread": lambda: ThreadPoolExecutor(1),
    "process": PlacementProcess,
}


@cache
def windows_LSE() -> list[np.ndarray]:
    """Return traffic whose topics change, so that every decision finds experts to move."""
    config = WindowConfig(LAYERS, EXPERTS, TOP_K, MESH.dp, persistence=0.5, drift=0.5)
    windows = itertools.islice(synthetic_windows(config, np.random.default_rng(0)), 6)
    return [window.counts_LSE for window in windows]


def tick_ms(policy: PlacementPolicy, executor: Executor, window_steps: int, step_s: float, ticks: int) -> np.ndarray:
    """Return the wall-clock milliseconds of each tick."""
    engine = replace(GPU_ENGINE, max_model_len=512, max_rows=ROWS, num_pages=ROWS * 10, max_queue=1000)
    config = ServerConfig(MESH, engine, placement=PlacementConfig(policy=policy, window_steps=window_steps))
    runner = InstantRunner(config, windows_LSE(), step_s)
    core = EngineCore(MODEL, config, runner, Rebalancer(MODEL, config, runner, executor))
    # The first call in a process imports its modules. Make this call before timing.
    executor.submit(static_placement, LAYERS, EXPERTS, MESH.ranks).result()
    try:
        core.open()
        clients = Clients(core, STEADY, ROWS)
        seconds: list[float] = []
        while len(seconds) < 50 + ticks or (window_steps < NEVER and len(core.status().placement.records) < LEAST):
            began = time.perf_counter()
            core.tick(time.monotonic())
            seconds.append(time.perf_counter() - began)
            clients.renew()
    finally:
        core.stop()
    return 1e3 * np.array(seconds[50:])


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    ticks: Annotated[int, typer.Option(min=100)] = 400,
    step_ms: Annotated[float, typer.Option(min=0.0, help="Milliseconds of a step.")] = 10.0,
    window_steps: Annotated[int, typer.Option(min=1, help="Steps between decisions.")] = 20,
) -> None:
    """Print milliseconds of a tick, and the ratio of its p99 to that without decisions (min, median and max)."""
    table = Table("policy", "decisions", "p50", "p99", "p99 / none: min", "median", "max")
    policies: list[PlacementPolicy] = [p for p in get_args(PlacementPolicy) if p in ("gimbal", "gimbal_refined")]
    for policy in policies:
        measured: dict[str, list[np.ndarray]] = {"none": [], **{name: [] for name in EXECUTORS}}
        for _ in range(rounds):
            for name in measured:
                executor = EXECUTORS[name]() if name in EXECUTORS else ThreadPoolExecutor(1)
                steps = window_steps if name in EXECUTORS else NEVER
                measured[name].append(np.percentile(tick_ms(policy, executor, steps, step_ms / 1e3, ticks), (50, 99)))
        for name, percentiles in measured.items():
            p50, p99 = (median(each) for each in zip(*percentiles, strict=True))
            ratios = [one[1] / none[1] for one, none in zip(percentiles, measured["none"], strict=True)]
            spread = (f"{value:.2f}" for value in (min(ratios), median(ratios), max(ratios)))
            table.add_row(policy, name, f"{p50:.2f}", f"{p99:.2f}", *spread)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
