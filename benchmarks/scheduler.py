"""Measure how long the scheduler's decisions take: medians over repeats, as a table and optionally as JSON.

Times depend on the host and on its other load. To compare two versions, run both on one host, one after the other, and
take the ratio.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, get_args

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from gimbal_jax.config import DispatchConfig, DispatchPolicy, EngineConfig, MeshConfig, PlacementConfig, QueueConfig
from gimbal_jax.scheduler.dispatcher import Dispatcher
from gimbal_jax.scheduler.distance import distance_SR
from gimbal_jax.scheduler.exact import exact_answer
from gimbal_jax.scheduler.greedy import greedy_rank_LE
from gimbal_jax.scheduler.late import Capacity, PendingRequest, bind
from gimbal_jax.scheduler.objective import Objective, window_objective
from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.scheduler.queue import QueueItem, queue_key
from gimbal_jax.scheduler.refined import refined_rank_LE
from gimbal_jax.scheduler.trace import idle_trace
from gimbal_jax.scheduler.windows import WindowConfig, synthetic_windows

BUDGET = 8192
"""Tokens of a step, as in the paper."""
REPEAT_S = 0.005
"""Minimum seconds of a repeat."""

Run = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One decision to time. ``make`` prepares it and returns the function to time."""

    name: str
    make: Callable[[], Run]
    target_us: float | None = None


def dispatch(policy: DispatchPolicy, engines: int) -> Run:
    """Return the dispatch and the end of one request, with different pressure on the engines."""
    dispatcher = Dispatcher(engines, DispatchConfig(policy), BUDGET, draw=lambda: 0.5)
    dispatcher.observe(
        replace(idle_trace(s, 1.0), waiting_prefill_tokens=100 * s, kv_use=0.5, expert_pressure=1.0 + s)
        for s in range(engines)
    )

    def run() -> None:
        dispatcher.dispatch("request", 1000, now=1.1).release()

    return run


def observe(engines: int) -> Run:
    """Return a round of traces from all engines. Each trace shows ten new requests."""
    dispatcher = Dispatcher(engines, DispatchConfig("round_robin"), BUDGET)
    traces = [idle_trace(s) for s in range(engines)]
    now, names = 0.0, [f"{i}" for i in range(10 * engines)]

    def run() -> None:
        nonlocal now, traces
        now += 1.0
        tickets = [dispatcher.dispatch(name, 1000, now) for name in names]
        traces = [replace(trace, time=now, seen=trace.seen + 10) for trace in traces]
        dispatcher.observe(traces)
        for ticket in tickets:
            ticket.release()

    return run


def sort_queue(requests: int) -> Run:
    """Return the sorting of a queue for one step."""
    config = QueueConfig()
    jobs = [QueueItem(arrival=0.01 * i, prefill_tokens=i * 37 % 1000) for i in range(requests)]
    return lambda: sorted(jobs, key=lambda job: queue_key(config, job, 8.0))


def bind_late(engines: int, requests: int) -> Run:
    """Return late binding to idle engines before one step."""
    config, queue = EngineConfig(token_budget=BUDGET, num_pages=10**6), QueueConfig()
    waiting = [PendingRequest(str(i), QueueItem(0.01 * i, 1000), (0,) * engines) for i in range(requests)]
    capacity_S = [Capacity(decode_rows=s, free_rows=32, free_pages=10**6, prefills=()) for s in range(engines)]
    return lambda: bind(waiting, capacity_S, config, queue, 0, 8.0)


def place(find: Callable[[Objective], object], layers: int, sources: int, ranks: int, nodes: int = 1) -> Run:
    """Return a placement decision, objective included, for 128 experts, a realistic window and contiguous placement."""
    window = next(synthetic_windows(WindowConfig(layers, sources=sources, persistence=0.5), np.random.default_rng(0)))
    slot_of_expert_LE, config = static_placement(layers, 128, ranks), PlacementConfig()
    apart_SR = distance_SR(MeshConfig(sources, ranks // sources, nodes), config.far_distance)
    return lambda: find(window_objective(window.counts_LSE, slot_of_expert_LE, apart_SR, config))


ROWS = [
    *(
        Row(f"dispatch {policy}, {engines} engines", lambda p=policy, s=engines: dispatch(p, s), target)  # type: ignore[misc]
        for policy in get_args(DispatchPolicy)
        for engines, target in ((2, None), (16, 20.0 if policy == "gimbal" else None), (256, None))
    ),
    Row("dispatch, observe and end 160 requests, 16 engines", lambda: observe(16)),
    Row("order 256 requests", lambda: sort_queue(256)),
    Row("bind 1 request, 2 engines", lambda: bind_late(2, 1)),
    Row("bind 256 requests, 16 engines", lambda: bind_late(16, 256)),
    Row("greedy, 48 layers, 4 ranks", lambda: place(greedy_rank_LE, 48, 2, 4), 15_000.0),
    Row("greedy, 94 layers, 64 ranks", lambda: place(greedy_rank_LE, 94, 8, 64)),
    Row("greedy, 94 layers, 64 ranks on 8 nodes", lambda: place(greedy_rank_LE, 94, 8, 64, 8)),
    Row("refined, 48 layers, 4 ranks", lambda: place(refined_rank_LE, 48, 2, 4), 100_000.0),
    Row("refined, 94 layers, 64 ranks", lambda: place(refined_rank_LE, 94, 8, 64)),
    Row("refined, 94 layers, 64 ranks on 8 nodes", lambda: place(refined_rank_LE, 94, 8, 64, 8)),
    Row("exact, 1 layer, 4 ranks (paper: 48 in 15 s)", lambda: place(exact_answer, 1, 2, 4)),
]


def microseconds(run: Run, repeats: int) -> float:
    """Return the median microseconds of one run over repeats. A repeat has as many runs as fill ``REPEAT_S``."""
    began = time.perf_counter()
    run()
    runs = max(1, round(REPEAT_S / (time.perf_counter() - began)))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(runs):
            run()
        times.append((time.perf_counter() - began) / runs)
    return 1e6 * median(times)


def main(
    only: Annotated[str, typer.Option(help="Time only the rows whose names contain this text.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of each row.")] = 15,
    out: Annotated[Path | None, typer.Option(help="JSON file for {name: microseconds}.")] = None,
) -> None:
    """Time the scheduler's decisions."""
    times = {row.name: microseconds(row.make(), repeats) for row in ROWS if only in row.name}
    table = Table("decision", "median, us", "target, us", title=f"{repeats} repeats")
    for row in ROWS:
        if row.name in times:
            table.add_row(row.name, f"{times[row.name]:,.1f}", f"{row.target_us:,.0f}" if row.target_us else "")
    Console().print(table)
    if out is not None:
        out.write_text(json.dumps(times, indent=1))


if __name__ == "__main__":
    typer.run(main)
