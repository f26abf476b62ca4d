"""Measure the host's work in a tick: ``EngineCore.tick`` over a runner that returns results immediately.

The runner packs the arrays of a step and unpacks results as for real devices (``serving.runtime.batch``), in numpy, but
computes no model. The measured time is therefore all work of the engine thread between two steps. It is shown by phase
for 2, 16 and 64 engines with 256 running requests each. ``--long`` measures memory over many ticks instead.
"""

from __future__ import annotations

import gc
import itertools
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from gimbal_jax.config import GPU_ENGINE, MeshConfig, ModelConfig, ServerConfig
from gimbal_jax.model.inputs import StepOutputs, step_shape
from gimbal_jax.scheduler.migration import Round
from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.serving.core.core import EngineCore, TickNews
from gimbal_jax.serving.engine.plan import Plan, StepResult
from gimbal_jax.serving.engine.request import Request, SamplingParams
from gimbal_jax.serving.engine.runner import Mark, Pending
from gimbal_jax.serving.runtime.batch import bucket_for, default_rare_inputs, pack_step, step_buckets, unpack_results

LAYERS, EXPERTS, TOP_K, VOCABULARY = 48, 128, 8, 151_936
"""Sizes of Qwen3-30B-A3B."""
MODEL = ModelConfig(
    VOCABULARY,
    2048,
    6144,
    LAYERS,
    32,
    4,
    128,
    EXPERTS,
    TOP_K,
    768,
    moe_layers=tuple(range(LAYERS)),
    max_position=40_960,
)
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)

CLOCK = time.thread_time
"""CPU time of the thread. It excludes other load of the host, and the measured code never waits."""

console = Console(width=150)


class InstantRunner:
    """A runner that chooses token 1 for every sequence and repeats a list of windows as its traffic."""

    expert_bytes = 3 * 2048 * 768 * 2
    ahead = 1

    def __init__(self, config: ServerConfig, windows_LSE: Sequence[np.ndarray], step_s: float = 0.0) -> None:
        """``begin_counts`` returns one of ``windows_LSE`` after the other. A step takes ``step_s`` seconds."""
        self.slot_of_expert_LE = static_placement(LAYERS, EXPERTS, config.mesh.ranks)
        self._engine, self._step_s = config.engine, step_s
        self._buckets = step_buckets(config.engine, config.mesh.tp)
        self._defaults = default_rare_inputs(config.engine, VOCABULARY, config.mesh.dp)
        self._done = 0.0  # time at which the last enqueued step ends
        self._windows_LSE = itertools.cycle(windows_LSE)

    def enqueue(self, plans: Sequence[Plan], mark: Mark) -> Pending:
        shape = step_shape(self._engine, bucket_for(plans, self._buckets))
        pack_step(plans, shape, self._defaults)
        mark("batch")
        done = self._done = max(self._done, time.perf_counter()) + self._step_s

        def pending() -> list[StepResult]:
            if (left := done - time.perf_counter()) > 0:
                time.sleep(left)
            outputs = StepOutputs(np.ones((len(plans), shape.sequences), np.int32), None, None)
            return [unpack_results(outputs, plan, engine, shape) for engine, plan in enumerate(plans)]

        return pending

    def begin_counts(self) -> Callable[[], np.ndarray]:
        counts_LSE = next(self._windows_LSE)
        return lambda: counts_LSE

    def migrate(self, layer: int, moves: Round) -> None:
        self.slot_of_expert_LE = self.slot_of_expert_LE.copy()
        self.slot_of_expert_LE[layer] = moves.slot_of_expert_E

    def compiles_after_warmup(self) -> int:
        return 0


@dataclass(frozen=True)
class Load:
    """The work of the engines."""

    name: str
    sampling: SamplingParams = GREEDY
    prompt: int = 128
    output: int = 3500
    """Output tokens of a request. A new request replaces each one that ends."""
    waiting: int = 0
    """Waiting requests of each engine, in addition to the running ones."""


STEADY = Load("ends and admissions", output=256)
LOADS = (
    Load("decode"),
    Load("sampling", replace(GREEDY, temperature=0.8, top_p=0.9, top_k=50)),
    STEADY,
    replace(STEADY, name="prefill chunks", prompt=2048),
    replace(STEADY, name="1,000 waiting", waiting=1000),
)


class Clients:
    """Clients that keep a fixed number of requests in each engine, all with different prompts."""

    def __init__(self, core: EngineCore, load: Load, running: int) -> None:
        self._core, self._load = core, load
        self._serial = itertools.count()
        self._sent = [0] * len(core.engines)
        self._engine_of: dict[str, int] = {}
        core.subscribe(self._take)
        self._ended: list[str] = []
        for engine in range(len(core.engines)):
            for place in range(running + load.waiting):
                # Give the first requests increasing lengths, so that they end one after the other.
                self._send(engine, 1 + (place * load.output) // running if place < running else load.output)

    def renew(self) -> None:
        """Send a new request for each one that has ended."""
        for name in self._ended:
            self._send(self._engine_of.pop(name), self._load.output)
        self._ended.clear()

    def _take(self, news: TickNews) -> None:
        self._ended += [output.request_id for output in news.outputs if output.finish_reason is not None]

    def _send(self, engine: int, output: int) -> None:
        serial = next(self._serial)
        name = str(serial)
        prompt = (serial % VOCABULARY, *range(self._load.prompt - 1))
        sampling = replace(self._load.sampling, max_tokens=min(output, self._load.output), seed=serial)
        self._sent[engine] += 1
        self._engine_of[name] = engine
        self._core.submit(Request(name, prompt, sampling, serial * 1e-6, engine, self._sent[engine]))


@contextmanager
def loaded_core(engines: int, rows: int, load: Load) -> Iterator[tuple[EngineCore, Clients]]:
    """Yield a server with all rows running, which the caller ticks."""
    longest = load.prompt + load.output + 1
    engine = replace(
        GPU_ENGINE, max_model_len=longest, max_rows=rows, num_pages=rows * (longest // 64 + 2), max_queue=2**20
    )
    config = ServerConfig(MeshConfig(engines, 1), engine)
    counts_LSE = np.random.default_rng(0).poisson(100, (LAYERS, engines, EXPERTS))
    core = EngineCore(MODEL, config, InstantRunner(config, [counts_LSE]), clock=CLOCK)
    try:
        core.open()
        clients = Clients(core, load, rows)
        while any(engine.running < rows for engine in core.engines):
            core.tick(time.monotonic())
            clients.renew()
        yield core, clients
    finally:
        core.stop()


def tick_seconds(core: EngineCore, clients: Clients, ticks: int) -> np.ndarray:
    """Return the seconds of each tick, without the time to send new requests."""
    seconds = np.zeros(ticks)
    for i in range(ticks):
        began = CLOCK()
        core.tick(time.monotonic())
        seconds[i] = CLOCK() - began
        clients.renew()
    return seconds


def at_scale(loads: Sequence[Load], sizes: Sequence[int], rows: int, ticks: int) -> list[dict[str, object]]:
    """Return the milliseconds (mean, p50, p99) of a tick and of its phases, for each load and number of engines."""
    found: list[dict[str, object]] = []
    for load in loads:
        for engines in sizes:
            with loaded_core(engines, rows, load) as (core, clients):
                tick_seconds(core, clients, 20)
                seconds = tick_seconds(core, clients, ticks)
                phases = {p.name: [1e3 * s for s in (p.mean_s, p.p50_s, p.p99_s)] for p in core.status().steps.phases}
            tick = [1e3 * float(value) for value in (seconds.mean(), *np.percentile(seconds, (50, 99)))]
            found.append({"load": load.name, "engines": engines, "tick": tick, **phases})
            console.print(f"{load.name}, {engines} engines: {tick[1]:.2f} ms")
    return found


def over_time(ticks: int, rows: int) -> None:
    """Print the traced memory of a running server, and the lines of code whose memory grew after the first tenth."""
    with loaded_core(2, rows, STEADY) as (core, clients):
        tracemalloc.start()
        for part in range(1, 11):
            tick_seconds(core, clients, ticks // 10)
            gc.collect()
            console.print(f"{part * (ticks // 10):,} ticks: {tracemalloc.get_traced_memory()[0] / 2**10:,.0f} KiB")
            if part == 1:
                first = tracemalloc.take_snapshot()
        grown = tracemalloc.take_snapshot().compare_to(first, "lineno")
    for line in [line for line in grown if line.size_diff > 0][:10]:
        console.print(line)


def main(
    engines: Annotated[str, typer.Option(help="Numbers of engines, separated by commas.")] = "2,16,64",
    rows: Annotated[int, typer.Option(min=1, help="Running requests of each engine.")] = 256,
    ticks: Annotated[int, typer.Option(min=10, help="Ticks to time; profiles hold the last 1,024.")] = 300,
    only: Annotated[str, typer.Option(help="Run only the loads whose names contain this text.")] = "",
    long: Annotated[int, typer.Option(min=0, help="Measure memory over this many ticks of two engines instead.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file for all results.")] = None,
) -> None:
    """Print the milliseconds of a tick, the medians of its phases, and the growth of its time per engine."""
    if long:
        return over_time(long, rows)
    sizes = [int(number) for number in engines.split(",")]
    found = at_scale([load for load in LOADS if only in load.name], sizes, rows, ticks)
    phases = [name for name in found[0] if name not in ("load", "engines", "tick")]
    table = Table("load", "engines", "mean", "p50", "p99", *phases, "growth per engine")
    first = 0.0
    for row in found:
        of_tick: list[float] = row["tick"]  # type: ignore[assignment]
        per_engine = of_tick[1] / row["engines"]  # type: ignore[operator]
        first = per_engine if row["engines"] == sizes[0] else first
        medians = (f"{row[name][1]:.2f}" for name in phases)  # type: ignore[index]
        table.add_row(
            str(row["load"]),
            str(row["engines"]),
            *(f"{value:.2f}" for value in of_tick),
            *medians,
            f"{per_engine / first:.2f}",
        )
    console.print(table)
    if out is not None:
        out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    typer.run(main)
