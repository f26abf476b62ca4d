"""How far each part scales: `python -m research.scale`, from 2 to 64 engines and from 4 to 256 GPUs.

Measured on this machine: time per dispatch (least of repeats), CPU time of placement decisions and of the simulator.
Simulated: what a placement makes of the next window of synthetic traffic, and whole runs with measured H100 kernels.
Every record goes to scale.jsonl in the folder of --out at once; the picture is scale.png. With --long it only runs
many requests on 32 engines, for each trace, into long.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gimbal_jax.cli.terminal import report_errors
from gimbal_jax.config import PlacementConfig
from gimbal_jax.simulation.scenario import MODEL as RUN_MODEL
from gimbal_jax.simulation.systems import SYSTEMS
from gimbal_jax.simulation.workload import Trace
from research.scale_parts import (
    DISPATCH,
    MODEL,
    PERSISTENCE,
    PLACEMENT,
    SIZES,
    Record,
    Size,
    dispatch_records,
    growth,
    placement_record,
    run_record,
    size_where_full,
)

OUT = Path(__file__).resolve().parents[1] / "out"
LONG_SIZE = Size(32, 64)
LONG_RATE: dict[Trace, float] = {"azure-conv": 4.0, "azure-code": 3.0}
"""Requests per second for each engine; more of them, and requests wait for seconds."""
console = Console()


@contextmanager
def lines_to(path: Path) -> Iterator[Callable[[Record], Record]]:
    """Gives a function that writes a record as a line, and hands it back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:

        def write(record: Record) -> Record:
            file.write(json.dumps(record) + "\n")
            file.flush()
            return record

        yield write


def sweep(
    sizes: Sequence[Size], system: str, requests: int, rate: float, repeats: int, seed: int, path: Path
) -> list[Record]:
    """Measure all parts at all sizes."""
    sources = sorted({size.sources for size in sizes})
    records: list[Record] = []
    with lines_to(path) as write, Progress(console=console) as progress:
        task = progress.add_task("dispatch", total=repeats * len(DISPATCH) * len(sources))
        records += map(write, dispatch_records(sources, repeats, partial(progress.advance, task)))
        task = progress.add_task("placement", total=len(PERSISTENCE) * len(sizes) * len(PLACEMENT))
        for persistence in PERSISTENCE:
            for size in sizes:
                for placement in PLACEMENT:
                    records.append(write(placement_record(placement, size, persistence, seed)))
                    progress.advance(task)
        runs = [size for size in sizes if size.ranks <= RUN_MODEL.num_experts]
        task = progress.add_task("runs", total=sum(requests * size.sources for size in runs))
        for size in runs:
            count = requests * size.sources
            advance = partial(progress.advance, task)
            records.append(write(run_record(system, size, "azure-conv", count, rate * size.sources, seed, advance)))
    return records


def long_runs(system: str, requests: int, seed: int, path: Path) -> list[Record]:
    """One run for each trace."""
    records = []
    with lines_to(path) as write, Progress(console=console) as progress:
        for lengths, rate in LONG_RATE.items():
            task = progress.add_task(lengths, total=requests)
            advance = partial(progress.advance, task)
            total_rate = rate * LONG_SIZE.sources
            done = run_record(system, LONG_SIZE, lengths, requests, total_rate, seed, advance)
            records.append(write(done))
    return records


def only(records: Sequence[Record], **wanted: object) -> list[Record]:
    """Those with these values."""
    return [record for record in records if all(record.get(name) == value for name, value in wanted.items())]


def column(records: Sequence[Record], name: str) -> list[float]:
    return [record[name] for record in records]


def tables(records: Sequence[Record]) -> Iterator[Table]:
    sources = sorted({record["sources"] for record in only(records, part="dispatch")})
    if sources:
        table = Table("us per dispatch", *(f"{n} engines" for n in sources), title="Dispatch, measured")
        for policy in DISPATCH:
            found = only(records, part="dispatch", policy=policy)
            table.add_row(policy, *(f"{us:.1f}" for us in column(found, "us")))
        yield table
    for persistence in PERSISTENCE:
        found = only(records, part="placement", persistence=persistence)
        if found:
            yield _placement_table(found, persistence)
    runs = only(records, part="run")
    if runs:
        yield _run_table(runs)


def _placement_table(records: Sequence[Record], persistence: float) -> Table:
    title = f"Placement of {len(MODEL.moe_layers)} layers, topic persistence {persistence:g}; gain in the next window"
    table = Table("engines x GPUs", "experts", "policy", title=title)
    for name in (
        "ms",
        "rounds, ms",
        "fullest / mean",
        "hottest expert",
        "remote",
        "moved",
        "GiB in all",
        "GiB a GPU",
        "rounds",
    ):
        table.add_column(name, justify="right")
    for record in records:
        gib = record["bytes"] / 2**30
        table.add_row(
            f"{record['sources']} x {record['ranks'] // record['sources']}",
            f"{record['experts']}",
            record["policy"],
            f"{record['ms']:,.0f}",
            f"{record['rounds_ms']:,.0f}",
            f"{record['imbalance_before']:.2f} > {record['imbalance_after']:.2f}",
            f"{record['hottest_expert']:.2f}",
            f"{record['remote_before']:.1%} > {record['remote_after']:.1%}",
            f"{record['moved']:,}",
            f"{gib:,.1f}",
            f"{gib / record['ranks']:,.2f}",
            f"{record['rounds']:,}",
            end_section=record["policy"] == PLACEMENT[-1],
        )
    return table


def _run_table(records: Sequence[Record]) -> Table:
    table = Table("trace", "engines", title=f"Simulated runs, {records[0]['system']}, one core")
    for name in ("requests", "CPU s", "requests / CPU s", "steps", "ms a step", "us a token", "simulated s", "TTFT s"):
        table.add_column(name, justify="right")
    for record in records:
        table.add_row(
            record["lengths"],
            f"{record['sources']}",
            f"{record['requests']:,}",
            f"{record['cpu_s']:,.1f}",
            f"{record['requests_per_cpu_s']:,.0f}",
            f"{record['steps']:,}",
            f"{record['cpu_ms_per_step']:.2f}",
            f"{record['cpu_us_per_output_token']:.1f}",
            f"{record['simulated_s']:,.0f}",
            f"{record['ttft_mean_s']:.2f}",
        )
    return table


def closing_lines(records: Sequence[Record], rate: float) -> Iterator[str]:
    """Where each part stops scaling, by what was measured."""
    for policy in DISPATCH:
        found = only(records, part="dispatch", policy=policy)
        sources, us = column(found, "sources"), column(found, "us")
        exponent = growth(sources, us)
        full = size_where_full(sources[-1], us[-1], exponent, rate)
        yield (
            f"dispatch {policy}: {us[0]:.1f} us at {sources[0]} engines, {us[-1]:.1f} at {sources[-1]}, growing as "
            f"engines^{exponent:.2f}; at {rate:g} requests/s for each engine one thread is full at {full:,.0f} engines"
        )
    runs = only(records, part="run")
    window_s = 1e-3 * runs[-1]["step_ms"] * PlacementConfig().window_steps
    for placement in PLACEMENT:
        for persistence in PERSISTENCE:
            yield _placement_line(only(records, part="placement", policy=placement, persistence=persistence), window_s)
    first, last = runs[0], runs[-1]
    exponent = growth(column(runs, "sources"), column(runs, "cpu_ms_per_step"))
    layers = len(RUN_MODEL.moe_layers)
    choices = layers * RUN_MODEL.experts_per_token * last["tokens_per_step"]
    yield (
        f"simulator: {first['requests_per_cpu_s']:,.0f} requests per CPU second at {first['sources']} engines, "
        f"{last['requests_per_cpu_s']:,.0f} at {last['sources']}; a step takes {first['cpu_ms_per_step']:.2f} and "
        f"{last['cpu_ms_per_step']:.2f} ms, growing as engines^{exponent:.2f}: at {last['sources']} engines it is "
        f"{last['tokens_per_step']:,.0f} tokens, {choices:,.0f} choices of experts to count, and "
        f"{layers * last['sources'] * RUN_MODEL.num_experts:,} sums by (layer, source, expert)"
    )
    for size in SIZES:
        if size.ranks > RUN_MODEL.num_experts:
            yield f"no run on {size.ranks} GPUs: {RUN_MODEL.num_experts} experts cannot be split over them"


def _placement_line(found: Sequence[Record], window_s: float) -> str:
    ms = column(found, "ms")
    evens = [r for r in found if r["imbalance_after"] < 0.99 * r["imbalance_before"]]
    nearer = [r for r in found if r["remote_after"] < r["remote_before"] - 0.005]
    first, last = found[0], found[-1]
    return (
        f"placement {first['policy']}, persistence {first['persistence']:g}: {ms[0]:,.0f} ms on {first['ranks']} GPUs, "
        f"{ms[-1]:,.0f} on {last['ranks']}, growing as GPUs^{growth(column(found, 'ranks'), ms):.2f}: "
        f"{ms[-1] / 1e3 / window_s:.0%} of a window of {window_s:.1f} s; evens loads {_up_to(evens)}, brings tokens "
        f"nearer {_up_to(nearer)}; on {last['ranks']} the hottest expert alone is {last['hottest_expert']:.2f} x mean"
    )


def _up_to(records: Sequence[Record]) -> str:
    if not records:
        return "nowhere"
    last = records[-1]
    return f"up to {last['ranks']} GPUs ({last['experts'] // last['ranks']} experts on each)"


def draw(records: Sequence[Record], path: Path) -> None:
    """Six panels over size: times above, what comes of them below."""
    figure = Figure(figsize=(14, 7.5), layout="constrained")
    (dispatch, decision, speed), (even, near, moved) = figure.subplots(2, 3)
    for policy in DISPATCH:
        found = only(records, part="dispatch", policy=policy)
        dispatch.plot(column(found, "sources"), column(found, "us"), "o-", label=policy)
    for placement, colour in zip(PLACEMENT, ("#4269d0", "#efb118", "#ff725c"), strict=True):
        for persistence, style in zip(PERSISTENCE, ("--", "-"), strict=True):
            found = only(records, part="placement", policy=placement, persistence=persistence)
            ranks, label = column(found, "ranks"), f"{placement}, {persistence:g}"
            kind = {"color": colour, "linestyle": style, "marker": "o", "label": label}
            decision.plot(ranks, column(found, "ms"), **kind)
            even.plot(ranks, column(found, "imbalance_after"), **kind)
            near.plot(ranks, column(found, "remote_after"), **kind)
            moved.plot(ranks, [r["bytes"] / r["ranks"] / 2**30 for r in found], **kind)
    for persistence, style in zip(PERSISTENCE, ("--", "-"), strict=True):
        found = only(records, part="placement", policy=PLACEMENT[0], persistence=persistence)
        label, kind = f"contiguous, {persistence:g}", {"color": "#444444", "linestyle": style}
        even.plot(column(found, "ranks"), column(found, "imbalance_before"), label=label, **kind)
        near.plot(column(found, "ranks"), column(found, "remote_before"), label=label, **kind)
    runs = only(records, part="run")
    speed.plot(column(runs, "sources"), column(runs, "requests_per_cpu_s"), "o-", label=f"{runs[0]['system']}")
    _finish(dispatch, "dispatch (measured)", "engines", "us per request")
    _finish(decision, "placement decision (measured); policy, persistence", "GPUs", "CPU ms")
    _finish(speed, "simulator (measured)", "engines", "simulated requests per CPU second")
    _finish(even, "next window: fullest rank / mean (simulated)", "GPUs", "mean over layers")
    _finish(near, "next window: remote share (simulated)", "GPUs", "share of expert tokens")
    _finish(moved, "weights that move for it (computed)", "GPUs", "GiB a GPU")
    for axes in (dispatch, decision):
        axes.set_yscale("log")
    figure.savefig(path, dpi=130)


def _finish(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)


def main(
    largest: Annotated[int, typer.Option(min=32, help="GPUs of the largest size of the sweep.")] = 256,
    requests: Annotated[int, typer.Option(min=1, help="Simulated requests for each engine; with --long in all.")] = 50,
    rate: Annotated[float, typer.Option(min=0.01, help="Requests per second for each engine.")] = 4.0,
    system: Annotated[
        str, typer.Option(help="System of the runs, by its name in gimbal_jax.simulation.systems.")
    ] = "gimbal",
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of each dispatch measurement.")] = 15,
    long: Annotated[bool, typer.Option(help="Instead: --requests on 32 engines, for each trace.")] = False,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Folder for records and picture.")] = OUT,
) -> None:
    """Sweep engines and GPUs, and say where each part stops scaling."""
    with report_errors():
        if system not in SYSTEMS:
            raise ValueError(f"system must be one of {', '.join(SYSTEMS)}, not {system}")
        if long:
            records = long_runs(system, requests, seed, out / "long.jsonl")
        else:
            sizes = [size for size in SIZES if size.ranks <= largest]
            records = sweep(sizes, system, requests, rate, repeats, seed, out / "scale.jsonl")
    wide = Console(width=170)
    for table in tables(records):
        wide.print(table)
    if not long:
        for line in closing_lines(records, rate):
            console.print(line, highlight=False, soft_wrap=True)
        draw(records, out / "scale.png")
    console.print(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
