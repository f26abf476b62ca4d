"""How far each part scales, from 2 to 64 engines and from 4 to 256 GPUs.

Measured on one core: time per dispatch, CPU time of placement decisions and of the simulator. Simulated: what a
placement does to the next window of synthetic traffic, and whole runs with measured H100 kernels. Every record is
written to out/scale.jsonl when it is done; with ``--long``, only many requests on 32 engines, to out/long.jsonl.

Axes: L MoE layers, S sources (DP engines), E experts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from benchmarks.scheduler import bind_late, dispatch, microseconds
from gimbal_jax.cli.terminal import console, print_table
from gimbal_jax.config import DispatchPolicy, MeshConfig, PlacementConfig, PlacementPolicy
from gimbal_jax.model.hf_config import PRESETS
from gimbal_jax.model.sizes import expert_bytes
from gimbal_jax.scheduler.migration import migration_between, plan_rounds
from gimbal_jax.scheduler.placement import propose, static_placement
from gimbal_jax.scheduler.traffic import imbalance_L, remote_share
from gimbal_jax.simulation.routing import Router, RoutingConfig, synthetic_router
from gimbal_jax.simulation.scenario import MODEL as RUN_MODEL
from gimbal_jax.simulation.scenario import Scenario, scenario_router, simulate_scenario
from gimbal_jax.simulation.workload import Trace, WorkloadConfig
from research.store import OUT

DISPATCH: tuple[DispatchPolicy, ...] = ("gimbal", "late", "vllm_classic")
PLACEMENT: tuple[PlacementPolicy, ...] = ("eplb", "gimbal", "gimbal_refined")
PERSISTENCE = (0.0, 0.8)
MODEL = PRESETS["Qwen3-235B-A22B"]
"""Model whose layers, experts and bytes placement is measured with."""
GPUS_PER_NODE = 8
WINDOW_REQUESTS = 32
"""Requests of each source in a window, of two blocks of tokens each."""
RATE = 4.0
"""Requests per second of each engine."""
REPEATS = 15

Record = Mapping[str, Any]
Columns = Mapping[str, Callable[[Record], str]]


@dataclass(frozen=True)
class Size:
    """A mesh. If it has more ranks than the model has experts, placement is measured with one expert per rank."""

    sources: int
    ranks: int

    @property
    def experts(self) -> int:
        return max(MODEL.num_experts, self.ranks)

    @property
    def mesh(self) -> MeshConfig:
        return MeshConfig(dp=self.sources, tp=self.ranks // self.sources)


SIZES = tuple(Size(*pair) for pair in ((2, 4), (4, 8), (8, 16), (16, 32), (32, 64), (64, 128), (64, 256)))
LONG_SIZE = Size(32, 64)
LONG_RATE: dict[Trace, float] = {"azure-conv": 4.0, "azure-code": 3.0}
"""Requests per second of each engine; at a higher rate requests wait for seconds."""


def sweep(sizes: Sequence[Size], requests: int, repeats: int = REPEATS) -> Iterator[Record]:
    """Measure all parts at all sizes. Runs have ``requests`` per engine, and at most as many ranks as experts."""
    for policy in DISPATCH:
        for sources in sorted({size.sources for size in sizes}):
            yield dispatch_record(policy, sources, repeats)
    for persistence in PERSISTENCE:
        for size in sizes:
            yield from (placement_record(policy, size, persistence) for policy in PLACEMENT)
    for size in sizes:
        if size.ranks <= RUN_MODEL.num_experts:
            yield run_record(size, "azure-conv", requests * size.sources, RATE * size.sources)


def dispatch_record(policy: DispatchPolicy, sources: int, repeats: int) -> Record:
    """Time one request from its dispatch to its end; under late binding, one of as many as there are engines."""
    late = policy == "late"
    us = microseconds(bind_late(sources, sources) if late else dispatch(policy, sources), repeats)
    return {"part": "dispatch", "policy": policy, "sources": sources, "us": us / sources if late else us}


def placement_record(policy: PlacementPolicy, size: Size, persistence: float, seed: int = 0) -> Record:
    """Decide from one window, from contiguous experts, and measure the next window under the decision."""
    router = _router(size.experts, persistence, seed)
    rng = np.random.default_rng(seed)
    window_LSE, next_LSE = (window_counts(router, size.sources, rng) for _ in range(2))
    config = PlacementConfig(policy)
    old_LE = static_placement(router.layers, router.experts, size.ranks)
    began = time.process_time()
    proposal = propose(window_LSE, old_LE, size.mesh, config)
    ms = 1e3 * (time.process_time() - began)
    new_LE = proposal.slot_of_expert_LE if proposal.apply else old_LE
    rounds_L = [len(plan_rounds(*pair, size.ranks, config.rows_per_pair)) for pair in zip(old_LE, new_LE, strict=True)]
    return {
        "part": "placement",
        "policy": policy,
        "sources": size.sources,
        "ranks": size.ranks,
        "experts": size.experts,
        "persistence": persistence,
        "ms": ms,
        "imbalance_before": float(imbalance_L(next_LSE, old_LE, size.ranks).mean()),
        "imbalance_after": float(imbalance_L(next_LSE, new_LE, size.ranks).mean()),
        "hottest_expert": hottest_expert(next_LSE, size.ranks),
        "remote_before": remote_share(next_LSE, old_LE, size.ranks),
        "remote_after": remote_share(next_LSE, new_LE, size.ranks),
        "moved": proposal.experts_moved if proposal.apply else 0,
        "bytes": migration_between(old_LE, new_LE, size.ranks).sent_bytes(expert_bytes(MODEL)),
        "rounds": sum(rounds_L),
    }


def hottest_expert(counts_LSE: np.ndarray, ranks: int) -> float:
    """Return the load of the hottest expert over the mean rank's, as a mean over layers: the floor of any placement."""
    load_LE = counts_LSE.sum(axis=1)
    return float((load_LE.max(axis=1) * ranks / load_LE.sum(axis=1)).mean())


def window_counts(router: Router, sources: int, rng: np.random.Generator) -> np.ndarray:
    """Return expert tokens [L, S, E] of ``WINDOW_REQUESTS`` prompts of each source."""
    counts_LSE = np.zeros((router.layers, sources, router.experts), np.int64)
    for source in range(sources):
        for topic in router.draw_topics([0.0] * WINDOW_REQUESTS, rng):
            profile = router.profile(router.prompt_token(topic), source, 0.0)
            counts_LSE[:, source] += router.count_blocks(profile, 2, rng)
    return counts_LSE


@lru_cache(maxsize=2)
def _router(experts: int, persistence: float, seed: int) -> Router:
    routing = RoutingConfig(persistence=persistence)
    return synthetic_router(routing, len(MODEL.moe_layers), experts, MODEL.experts_per_token, seed)


def run_record(size: Size, lengths: Trace, requests: int, rate: float) -> Record:
    """Simulate Qwen3-30B-A3B under gimbal on H100s, at ``rate`` requests per second in all."""
    mesh = replace(size.mesh, nodes=max(1, size.ranks // GPUS_PER_NODE))
    scenario = Scenario(workload=WorkloadConfig(lengths, requests, rate), mesh=mesh)
    scenario_router(scenario)  # the router is cached, so its making is not a part of the run
    began = time.process_time()
    run = simulate_scenario(scenario)
    cpu_s = time.process_time() - began
    return {
        "part": "run",
        "lengths": lengths,
        "sources": size.sources,
        "requests": requests,
        "cpu_s": cpu_s,
        "requests_per_cpu_s": requests / cpu_s,
        "steps": run.steps,
        "cpu_ms_per_step": 1e3 * cpu_s / run.steps,
        "cpu_us_per_output_token": 1e6 * cpu_s / sum(m.output_tokens for m in run.requests),
        "step_ms": 1e3 * sum(run.parts.values()) / run.steps,
        "ttft_mean_s": run.clients.ttft_mean_s,
    }


def growth(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the exponent a of values ~ sizes ** a, fitted to the largest four sizes."""
    return float(np.polyfit(np.log(sizes[-4:]), np.log(values[-4:]), 1)[0])


def size_where_full(size: float, us: float, exponent: float, rate: float) -> float:
    """Return the number of engines at which one thread only dispatches.

    ``us`` is the time of a dispatch at ``size`` engines, growing by ``exponent``; ``rate`` is that of each engine.
    """
    return size * (1e6 / (us * rate * size)) ** (1 / (1 + exponent))


PLACEMENT_COLUMNS: Columns = {
    "engines x GPUs": lambda r: f"{r['sources']} x {r['ranks'] // r['sources']}",
    "experts": lambda r: f"{r['experts']}",
    "policy": lambda r: r["policy"],
    "persistence": lambda r: f"{r['persistence']:g}",
    "ms": lambda r: f"{r['ms']:,.0f}",
    "fullest / mean": lambda r: f"{r['imbalance_before']:.2f} > {r['imbalance_after']:.2f}",
    "hottest expert": lambda r: f"{r['hottest_expert']:.2f}",
    "remote": lambda r: f"{r['remote_before']:.1%} > {r['remote_after']:.1%}",
    "moved": lambda r: f"{r['moved']:,}",
    "GiB a GPU": lambda r: f"{r['bytes'] / 2**30 / r['ranks']:,.2f}",
    "rounds": lambda r: f"{r['rounds']:,}",
}
RUN_COLUMNS: Columns = {
    "trace": lambda r: r["lengths"],
    "engines": lambda r: f"{r['sources']}",
    "requests": lambda r: f"{r['requests']:,}",
    "CPU s": lambda r: f"{r['cpu_s']:,.1f}",
    "requests / CPU s": lambda r: f"{r['requests_per_cpu_s']:,.0f}",
    "steps": lambda r: f"{r['steps']:,}",
    "CPU ms a step": lambda r: f"{r['cpu_ms_per_step']:.2f}",
    "CPU us a token": lambda r: f"{r['cpu_us_per_output_token']:.1f}",
    "step, ms": lambda r: f"{r['step_ms']:.1f}",
    "TTFT s": lambda r: f"{r['ttft_mean_s']:.2f}",
}


def tables(records: Sequence[Record]) -> Iterator[Table]:
    """Yield a table for each part that has records."""
    of_part = {part: [r for r in records if r["part"] == part] for part in ("dispatch", "placement", "run")}
    if found := of_part["dispatch"]:
        yield dispatch_table(found)
    if found := of_part["placement"]:
        yield _table("Placement; gain in the next window", PLACEMENT_COLUMNS, found)
        yield growth_table(found)
    if found := of_part["run"]:
        yield _table("Simulated runs of gimbal, one core", RUN_COLUMNS, found)


def _table(title: str, columns: Columns, records: Iterable[Record]) -> Table:
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="right")
    for record in records:
        table.add_row(*(cell(record) for cell in columns.values()))
    return table


def dispatch_table(records: Sequence[Record]) -> Table:
    """Return the time of a dispatch at each size, its growth, and where one thread is full."""
    sources = sorted({record["sources"] for record in records})
    title = f"us per dispatch, and the engines at which one thread is full ({RATE:g} requests/s each)"
    table = Table("policy", *(f"{n} engines" for n in sources), "engines^", "full at", title=title)
    for policy in DISPATCH:
        us = [record["us"] for record in records if record["policy"] == policy]
        exponent = growth(sources, us)
        full = size_where_full(sources[-1], us[-1], exponent, RATE)
        table.add_row(policy, *(f"{value:.1f}" for value in us), f"{exponent:.2f}", f"{full:,.0f}")
    return table


def growth_table(records: Sequence[Record]) -> Table:
    """Return how decisions grow with the number of GPUs."""
    table = Table("policy", "persistence", "smallest, ms", "largest, ms", "GPUs^", title="Growth of decisions")
    for policy in PLACEMENT:
        for persistence in PERSISTENCE:
            found = [r for r in records if (r["policy"], r["persistence"]) == (policy, persistence)]
            ms = [r["ms"] for r in found]
            exponent = growth([r["ranks"] for r in found], ms)
            table.add_row(policy, f"{persistence:g}", f"{ms[0]:,.0f}", f"{ms[-1]:,.0f}", f"{exponent:.2f}")
    return table


def main(
    requests: Annotated[int, typer.Option(min=1, help="Simulated requests per engine; with --long in all.")] = 50,
    long: Annotated[bool, typer.Option(help="Only simulate --requests on 32 engines, per trace.")] = False,
) -> None:
    """Sweep engines and GPUs."""
    OUT.mkdir(exist_ok=True)
    path = OUT / ("long.jsonl" if long else "scale.jsonl")
    long_runs = (run_record(LONG_SIZE, name, requests, rate * LONG_SIZE.sources) for name, rate in LONG_RATE.items())
    records = []
    with path.open("w") as file:
        for record in long_runs if long else sweep(SIZES, requests):
            file.write(json.dumps(record) + "\n")
            file.flush()
            records.append(record)
            console.print(" ".join(str(record.get(key, "")) for key in ("part", "policy", "sources", "ranks")).strip())
    for table in tables(records):
        print_table(table)
    console.print(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
