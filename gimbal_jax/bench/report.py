"""Results of a benchmark as tables and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.table import Column, Table

from gimbal_jax.bench.load import LoadConfig
from gimbal_jax.bench.rounds import Kind, Round, Surface, median_summary
from gimbal_jax.serving.engine.meters import PhaseTimes

LATENCIES = {"TTFT": "ttft", "TPOT": "tpot", "ITL": "itl", "E2E": "e2e"}


def bench_record(
    surface: Surface, load: LoadConfig, rounds: Sequence[Round], peak_rss_bytes: int | None, version: str
) -> dict[str, Any]:
    """Return all results for JSON, in seconds and bytes, with None for unknown values."""
    return _without_nan(
        {
            "version": version,
            "surface": surface.name,
            "address": surface.address,
            "model": surface.model,
            "prompts": surface.prompts,
            "load": asdict(load),
            "rounds": [asdict(r) for r in rounds],
            "median": _medians(rounds),
            "peak_rss_bytes": peak_rss_bytes,
        }
    )


def rate_table(rounds: Sequence[Round]) -> Table:
    """Return a table with a row for each round, and the medians of each kind."""
    names = "requests\n/s", "output\ntokens/s", "all\ntokens/s", "cached", "failed", "client\nCPU s", "server\nCPU s"

    def cells(r: Round) -> list[str]:
        server = "-" if r.server_cpu_s is None else f"{r.server_cpu_s:.2f}"
        return [*_rates(vars(r.summary)), f"{r.client_cpu_s:.2f}", server]

    return _rounds_table(names, rounds, cells, _rates)


def latency_table(rounds: Sequence[Round]) -> Table:
    """Return a table of mean, p50 and p99 in milliseconds, by round and as medians of each kind."""
    names = [f"{name}, ms\nmean/p50/p99" for name in LATENCIES]
    return _rounds_table(names, rounds, lambda r: _latencies(vars(r.summary)), _latencies)


def _rounds_table(
    names: Sequence[str],
    rounds: Sequence[Round],
    cells: Callable[[Round], list[str]],
    median_cells: Callable[[Mapping[str, float]], list[str]],
) -> Table:
    table, medians = _table("round", *names), _medians(rounds)
    for kind, group in groupby(rounds, lambda r: r.kind):
        for r in group:
            table.add_row(f"{r.kind} {r.number + 1}", *cells(r))
        if kind in medians:
            table.add_row("median", *median_cells(medians[kind]), style="bold")
        table.add_section()
    return table


def _rates(summary: Mapping[str, float]) -> list[str]:
    return [
        f"{summary['requests_per_s']:.2f}",
        f"{summary['output_tokens_per_s']:,.1f}",
        f"{summary['tokens_per_s']:,.1f}",
        f"{summary['cached_tokens'] / summary['input_tokens']:.1%}" if summary["input_tokens"] else "-",
        f"{summary['failed']:g}",
    ]


def _latencies(summary: Mapping[str, float]) -> list[str]:
    return [
        "/".join(_ms(summary[f"{name}_{which}_s"]) for which in ("mean", "p50", "p99")) for name in LATENCIES.values()
    ]


def profile_table(kind: str, phases: Sequence[PhaseTimes]) -> Table:
    """Return a table of the parts of the server's ticks."""
    table = _table(f"ms of a tick, {kind}", "mean", "p50", "p99", "share")
    tick = math.fsum(phase.mean_s for phase in phases)
    for phase in phases:
        share = f"{phase.mean_s / tick:.1%}" if tick else "-"
        table.add_row(phase.name, *(f"{s * 1e3:.3f}" for s in (phase.mean_s, phase.p50_s, phase.p99_s)), share)
    table.add_row("all", f"{tick * 1e3:.3f}", "", "", "", style="bold")
    return table


def last_profiles(rounds: Sequence[Round]) -> dict[str, tuple[PhaseTimes, ...]]:
    """Return the profile of the last round of each kind, without warm-up."""
    return {r.kind: r.phases for r in rounds if r.phases and r.kind != "warmup"}


def _medians(rounds: Sequence[Round]) -> dict[Kind, dict[str, float]]:
    """Return the median summary of each kind of counted rounds."""
    counted = [r for r in rounds if r.kind != "warmup"]
    kinds = dict.fromkeys(r.kind for r in counted)
    return {kind: median_summary([r.summary for r in counted if r.kind == kind]) for kind in kinds}


def _table(first: str, *others: str) -> Table:
    table = Table(Column(first, no_wrap=True), pad_edge=False)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:.{1 if seconds < 0.1 else 0}f}"


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
