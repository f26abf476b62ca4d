"""The ``gimbal simulate`` command: one run on simulated GPUs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gimbal_jax.cli.terminal import console, print_table, report_errors
from gimbal_jax.config import DispatchConfig, Exchange, MeshConfig, PlacementConfig, QueueConfig
from gimbal_jax.simulation.cost_sets import CostSet
from gimbal_jax.simulation.routing import BALANCED, RoutingConfig
from gimbal_jax.simulation.scenario import OnDone, Scenario, run_scenario, with_rate
from gimbal_jax.simulation.systems import SYSTEMS
from gimbal_jax.simulation.workload import Arrivals, Lengths, WorkloadConfig

_SYNTHETIC = RoutingConfig()


def simulate(
    system: Annotated[str, typer.Option(help="System to simulate; --list-systems lists all.")] = Scenario.system,
    list_systems: Annotated[bool, typer.Option("--list-systems", help="List the systems, run nothing.")] = False,
    model: Annotated[
        str, typer.Option(help="A published model. Prices of models other than the default follow by rules.")
    ] = Scenario.model,
    costs: Annotated[CostSet, typer.Option(help="Prices of steps; see docs/simulation.md.")] = Scenario.costs,
    lengths: Annotated[
        Lengths, typer.Option(help="Real requests of a trace, or BurstGPT's in one of the paper's five shapes.")
    ] = WorkloadConfig.lengths,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = WorkloadConfig.requests,
    rate: Annotated[float | None, typer.Option(help=f"Requests per second; default {WorkloadConfig.rate:g}.")] = None,
    share_of_capacity: Annotated[
        float | None,
        typer.Option(help="Rate as a share of the rate that `vllm` sustains in this scenario, such as 0.8."),
    ] = None,
    arrivals: Annotated[
        Arrivals, typer.Option(help="Arrival times. trace: as in the trace, at-once: all at 0.")
    ] = WorkloadConfig.arrivals,
    burstiness: Annotated[
        float, typer.Option(help="Coefficient of variation of the gaps of bursty arrivals; 1 is Poisson.")
    ] = WorkloadConfig.burstiness,
    token_budget: Annotated[int, typer.Option(min=1, help="Most tokens per engine and step.")] = Scenario.token_budget,
    max_rows: Annotated[int, typer.Option(min=1, help="Most requests per engine at once.")] = Scenario.max_rows,
    kv_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens in each engine's KV cache; `gimbal mesh plan` prints how many fit.")
    ] = Scenario.kv_tokens,
    dp: Annotated[int, typer.Option(min=1, help="DP engines.")] = Scenario.mesh.dp,
    tp: Annotated[
        int, typer.Option(min=1, help="GPUs of each engine; experts are spread over all.")
    ] = Scenario.mesh.tp,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that the GPUs are spread over.")] = Scenario.mesh.nodes,
    exchange: Annotated[Exchange, typer.Option(help="How tokens travel to experts.")] = Scenario.exchange,
    routing: Annotated[
        str, typer.Option(help="synthetic, balanced, or a counts file (.npz) of a real server.", metavar="HOW|FILE")
    ] = "synthetic",
    topics: Annotated[
        int | None, typer.Option(min=1, help=f"Topics of synthetic routing; default {_SYNTHETIC.topics}.")
    ] = None,
    persistence: Annotated[
        float | None, typer.Option(help="Chance that a request has its engine's topic; default 0.")
    ] = None,
    trend: Annotated[
        float | None, typer.Option(help="Chance that any other request has the topic in fashion; default 0.")
    ] = None,
    trend_s: Annotated[
        float, typer.Option(help="Seconds that a fashion, an engine's topic, or a window of a counts file lasts.")
    ] = _SYNTHETIC.trend_s,
    seed: Annotated[int, typer.Option(min=0, help="Seed of router, requests and run.")] = Scenario.seed,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Append the scenario and its results to this file, as a line of JSON.")
    ] = None,
) -> None:
    """Simulate a system that serves on H100s, with the real scheduler and kernel times measured for Qwen3-30B-A3B."""
    if list_systems:
        print_table(systems_table())
        return
    with report_errors():
        if system not in SYSTEMS:
            raise ValueError(f"--system {system}: must be one of {', '.join(SYSTEMS)}")
        if rate is not None and share_of_capacity is not None:
            raise ValueError("--rate and --share-of-capacity both set the rate: give one of them")
        traffic, recording = _routing(routing, topics, persistence, trend, trend_s)
        scenario = Scenario(
            system=system,
            costs=costs,
            workload=WorkloadConfig(
                lengths, requests, WorkloadConfig.rate if rate is None else rate, arrivals, burstiness
            ),
            share_of_capacity=share_of_capacity,
            routing=traffic,
            recording=recording,
            model=model,
            mesh=MeshConfig(dp, tp, nodes),
            exchange=exchange,
            token_budget=token_budget,
            max_rows=max_rows,
            kv_tokens=kv_tokens,
            seed=seed,
        )
        at_rate = scenario
        if share_of_capacity is not None:
            with console.status("measuring the capacity of vllm"):
                at_rate = with_rate(scenario)
        began = time.perf_counter()
        with _progress(requests) as on_done:
            record = run_scenario(scenario, on_done)
        seconds = time.perf_counter() - began
        if json_file is not None:
            with json_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
    print_table(result_table(record))
    out = Console()
    for line in scenario_lines(at_rate, share_of_capacity):
        out.print(line, highlight=False, markup=False)
    console.print(f"{requests / seconds:,.0f} requests simulated per second, {seconds:.1f} s in all")


def _routing(
    how: str, topics: int | None, persistence: float | None, trend: float | None, trend_s: float
) -> tuple[RoutingConfig, str | None]:
    """Return the router's settings, and the counts file to route by, None for a synthetic router."""
    given = {"topics": topics, "persistence": persistence, "trend": trend}
    known = {name: value for name, value in given.items() if value is not None}
    if how == "synthetic":
        return RoutingConfig(**known, trend_s=trend_s), None  # type: ignore[arg-type]
    if known:
        raise ValueError(f"--{next(iter(known))} is for --routing synthetic, not {how}")
    if how == "balanced":
        return BALANCED, None
    return RoutingConfig(trend_s=trend_s), how


@contextmanager
def _progress(requests: int) -> Iterator[OnDone]:
    """Show a progress bar of finished requests, with the simulated time and the speed. Yield its ``on_done``."""
    columns = (
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[at]:,.1f} s simulated, {task.fields[speed]:,.0f} requests/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=requests, at=0.0, speed=0.0)

        update = partial(progress.update, task, advance=1)
        yield lambda done: update(at=done.arrival_s + done.e2e_s, speed=progress.tasks[task].speed or 0.0)


def systems_table() -> Table:
    """Return a table of all systems and their descriptions."""
    table = Table()
    table.add_column("system", no_wrap=True)
    table.add_column("what it is")
    for system in SYSTEMS.values():
        table.add_row(system.name, system.summary)
    return table


def result_table(record: dict[str, Any]) -> Table:
    """Return the results of a run as a table."""
    clients = record["clients"]
    table = Table("", title=f"{record['scenario']['system']}: simulated, not measured")
    table.add_column("mean", justify="right")
    table.add_column("p99", justify="right")
    for name in "ttft", "tpot", "e2e":
        table.add_row(f"{name.upper()} (ms)", *(_ms(clients[f"{name}_{which}_s"]) for which in ("mean", "p99")))
    parts = record["seconds_by_part"]
    longest = sorted(parts, key=parts.__getitem__, reverse=True)
    extrapolated = [f"{count:,} of {name}" for name, count in record["outside"].items() if count]
    rows = {
        "requests / failed": f"{clients['requests']:,} / {clients['failed']:,}",
        "requests per s": f"{record['requests_per_s']:.3f}",
        "output / all tokens per s": f"{clients['output_tokens_per_s']:,.0f} / {clients['tokens_per_s']:,.0f}",
        "simulated time (s) / steps": f"{record['seconds']:,.1f} / {record['steps']:,}",
        "running requests per engine": f"{record['running']:.1f}",
        "KV cache in use": f"{record['kv_use']:.1%}",
        "prompt gap between engines (tokens/s)": _whole(record["prompt_gap_tokens_per_s"]),
        "rank imbalance (fullest / mean)": f"{record['imbalance']:.3f}",
        "remote share of expert tokens": f"{record['remote_share']:.1%}",
        "share / bytes per token that cross nodes": (
            f"{record['far_share']:.1%} / {record['far_bytes_per_token']:,.0f}"
        ),
        "placements applied / experts moved": f"{record['placements_applied']} / {record['experts_moved']:,}",
        "preemptions": f"{record['preemptions']:,}",
        "time in steps, by part": "\n".join(f"{name} {parts[name] / sum(parts.values()):.1%}" for name in longest),
        "prices outside of what was measured": "\n".join(extrapolated) or "none",
    }
    for label, value in rows.items():
        table.add_row(label, value, "")
    return table


def scenario_lines(scenario: Scenario, share: float | None) -> list[str]:
    """Describe the configuration. ``share`` is the rate as a share of capacity, None if the rate was given directly."""
    work, mesh = scenario.workload, scenario.mesh
    at = "" if work.arrivals == "at-once" else f" at {work.rate:.4g}/s"
    of_capacity = "" if share is None else f", {share:.0%} of the capacity of vllm"
    system = SYSTEMS[scenario.system]
    first = system.first_window_steps or system.placement.window_steps
    moved = f"placed offline by {system.offline}" if system.offline else f"first decision after {first:,} steps"
    return [
        f"{scenario.model} on {mesh.ranks} H100s: DP {mesh.dp} x TP {mesh.tp}, {mesh.nodes} node(s), "
        f"{scenario.exchange} exchange, {scenario.costs} costs",
        f"{scenario.token_budget:,} tokens a step, {scenario.max_rows} rows, {scenario.kv_tokens:,} tokens of KV cache "
        "per engine",
        f"{work.requests:,} requests, lengths {work.lengths}, {work.arrivals}{at}{of_capacity}; seed {scenario.seed}",
        f"routing: {scenario.recording or 'synthetic'}, {_settings(scenario.routing)}",
        f"dispatch: {_settings(system.dispatch)}",
        f"queue: {_settings(system.queue)}",
        f"experts: {_settings(system.placement)}; {moved}, migration {system.migration}",
    ]


def _settings(config: DispatchConfig | QueueConfig | PlacementConfig | RoutingConfig) -> str:
    return " ".join(f"{name}={value}" for name, value in asdict(config).items())


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f}"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
