"""Run a server for twenty minutes near its capacity, with cancelled, late and killed clients and moving experts.

    python -m benchmarks.stress.soak [--seconds 1200] [--share 0.8] [--seed 0]

1. Starts ``gimbal serve`` on the demo model with two engines.
2. Records the tokens of a set of greedy requests while the server is quiet.
3. Measures the requests per second that the server sustains, and sends ``--share`` of that for ``--seconds``.
   Meanwhile some requests are cancelled after a few tokens, and some have a deadline that is too short. Every minute a
   client process with open streams is killed. Every few seconds a placement decision moves experts.
4. Prints the lost tokens and pages, and the change of memory, file handles and latency.

It writes out/soak/soak.json and soak.png. Exit code 1 if a token or a page is missing or wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.stress.checked_streams import (
    TIE,
    Call,
    Fate,
    Sample,
    Seen,
    make_calls,
    one,
    quiet_answers,
    request_of,
    sample,
    settled,
)
from gimbal_jax.bench.server_process import running_server
from gimbal_jax.client.client import GimbalClient
from gimbal_jax.model.demo_model import write_demo_model

OUT = Path("out/soak")
MODEL = OUT / "demo-model"
# Without smoothing and minimum gain the placement follows noise, so that every decision moves experts.
SERVER = ("--devices", "cpu:2", "--dp", "2", "--min-gain", "0", "--smoothing", "0", "--max-queue", "512")
REQUESTS = 96
CAPACITY_CLIENTS, CAPACITY_S = 48, 20.0
CANCELLED, LATE = 0.12, 0.05
"""Share of requests that their client cancels, and share of requests with a deadline that is too short."""
MOVE_PERIOD_S, SAMPLE_PERIOD_S, KILL_PERIOD_S = 3.0, 5.0, 60.0
VICTIM_STREAMS, VICTIM_LIFE_S = 8, 4.0
WARM_UP_SHARE = 0.25
"""First share of the run, which the slope of memory ignores because pools and caches fill."""

console = Console()


@dataclass
class Soak:
    """All measurements of a run."""

    seen: list[Seen] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    killed: int = 0


def main(
    seconds: Annotated[float, typer.Option(min=10, help="Seconds of load.")] = 1200,
    share: Annotated[float, typer.Option(min=0.05, max=1.5, help="Load as a share of the measured capacity.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Seed of prompts, arrivals and fates.")] = 0,
    victim: Annotated[
        str, typer.Option(hidden=True, help="Run as a client of this server, which the soak kills.")
    ] = "",
) -> None:
    """Put load on a server with cancelled, late and killed clients and migrations, and print what it loses."""
    if victim:
        asyncio.run(be_killed(victim, seed))
        return
    OUT.mkdir(parents=True, exist_ok=True)
    if not (MODEL / "config.json").exists():
        write_demo_model(MODEL)
    if not asyncio.run(soak(seconds, share, seed)):
        raise typer.Exit(1)


async def soak(seconds: float, share: float, seed: int) -> bool:
    rng = np.random.default_rng(seed)
    async with running_server(MODEL, SERVER, OUT / "server.log") as server, GimbalClient(server.target) as client:
        pages = [engine.free_pages for engine in (await client.status()).engines]
        calls = await quiet_answers(client, make_calls(MODEL, REQUESTS, rng), console)
        capacity = await measured_capacity(client, calls)
        console.print(f"capacity: {capacity:.1f} requests/s with {CAPACITY_CLIENTS} clients; load: {share:.0%} of it")
        await settled(client)
        before = await sample(client, server.pid, 0.0)
        result = Soak()
        helpers = [
            asyncio.create_task(keep_sampling(client, server.pid, result)),
            asyncio.create_task(keep_moving(client)),
            asyncio.create_task(keep_killing(server.target, result)),
        ]
        result.seen = await open_loop(client, calls, capacity * share, seconds, rng)
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        await settled(client)
        after = await sample(client, server.pid, seconds)
        status = await client.status()
        findings: dict[str, int | str] = {
            "requests": len(result.seen),
            "streams with missing or extra tokens": sum(bool(seen.wrong) for seen in result.seen),
            "streams with other tokens (ties included)": sum(seen.gap is not None for seen in result.seen),
            "streams with other tokens (ties excluded)": sum((seen.gap or 0) > TIE for seen in result.seen),
            "pages missing": sum(pages) - sum(engine.free_pages for engine in status.engines),
            "additional file handles": after.files - before.files,
            "clients killed": result.killed,
            "experts moved": status.placement.experts_moved,
            "compiles after warm-up": status.steps.compiles_after_warmup,
            "RSS before and after, MiB": f"{before.rss_mib:.0f}, {after.rss_mib:.0f}",
            "RSS slope, MiB per hour": f"{rss_slope(result.samples):.1f}",
        }
    report(findings, result, seconds)
    draw(result, OUT / "soak.png")
    numbers = {"findings": findings, **asdict(result)}
    (OUT / "soak.json").write_text(json.dumps(numbers))
    bad = "streams with missing or extra tokens", "streams with other tokens (ties excluded)", "pages missing"
    return not any(findings[name] for name in bad)


async def measured_capacity(client: GimbalClient, calls: list[Call]) -> float:
    """Return the requests per second of clients that never pause, without the first quarter of the time."""
    start = time.monotonic()
    ends: list[float] = []

    async def keep_asking(number: int) -> None:
        while time.monotonic() < start + CAPACITY_S:
            async for _ in client.engine.Generate(request_of(calls[number % len(calls)])):
                pass
            ends.append(time.monotonic())
            number += CAPACITY_CLIENTS

    await asyncio.gather(*(keep_asking(number) for number in range(CAPACITY_CLIENTS)))
    return sum(CAPACITY_S / 4 <= end - start < CAPACITY_S for end in ends) / (CAPACITY_S * 3 / 4)


async def open_loop(
    client: GimbalClient, calls: list[Call], rate: float, seconds: float, rng: np.random.Generator
) -> list[Seen]:
    """Send requests with Poisson arrivals, independent of earlier ones, each with its own fate."""
    start = time.monotonic()
    due_s, tasks = 0.0, []
    async with asyncio.TaskGroup() as group:
        while (due_s := due_s + rng.exponential(1 / rate)) < seconds:
            await asyncio.sleep(max(0.0, start + due_s - time.monotonic()))
            call, patience, luck = calls[rng.integers(len(calls))], rng.random(), rng.random()
            fate: Fate = "cancelled" if luck < CANCELLED else "late" if luck < CANCELLED + LATE else "whole"
            tasks.append(group.create_task(one(client, call, fate, patience, start, start + due_s)))
    return [task.result() for task in tasks]


async def keep_moving(client: GimbalClient) -> None:
    while True:
        await asyncio.sleep(MOVE_PERIOD_S)
        await client.rebalance()


async def keep_killing(target: str, result: Soak) -> None:
    """Start a client with open streams every minute, and kill it after a few seconds."""
    while True:
        command = [sys.executable, "-m", "benchmarks.stress.soak", "--victim", target, "--seed", str(result.killed)]
        victim = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            await asyncio.sleep(VICTIM_LIFE_S)
        finally:
            victim.send_signal(signal.SIGKILL)
            victim.wait()
        result.killed += 1
        await asyncio.sleep(KILL_PERIOD_S - VICTIM_LIFE_S)


async def be_killed(target: str, seed: int) -> None:
    async with GimbalClient(target) as client:

        async def stream(number: int) -> None:
            prompt = np.random.default_rng(seed * VICTIM_STREAMS + number).integers(10, 500, 60)
            async for _ in client.engine.Generate(request_of(Call(tuple(prompt.tolist()), 2000))):
                pass

        await asyncio.gather(*(stream(number) for number in range(VICTIM_STREAMS)))


async def keep_sampling(client: GimbalClient, pid: int, result: Soak) -> None:
    start = time.monotonic()
    while True:
        result.samples.append(await sample(client, pid, time.monotonic() - start))
        await asyncio.sleep(SAMPLE_PERIOD_S)


def rss_slope(samples: list[Sample]) -> float:
    """Return the growth of memory in MiB per hour by least squares, without the first part of the run.

    NaN if there are fewer than three samples.
    """
    kept = [sample for sample in samples if sample.time_s >= WARM_UP_SHARE * samples[-1].time_s]
    if len(kept) < 3:
        return float("nan")
    return float(np.polyfit([s.time_s / 3600 for s in kept], [s.rss_mib for s in kept], 1)[0])


def quarters(result: Soak, seconds: float) -> list[tuple[int, float, float, float, float]]:
    """Return (streams, TTFT p50, TTFT p99, TPOT p50, TPOT p99) of each quarter, in milliseconds, for whole streams."""
    rows = []
    for quarter in range(4):
        whole = [s for s in result.seen if s.fate == "whole" and quarter <= 4 * s.sent_s / seconds < quarter + 1]
        ttft = [1e3 * s.ttft_s for s in whole if not np.isnan(s.ttft_s)] or [float("nan")]
        tpot = [1e3 * (s.e2e_s - s.ttft_s) / (s.tokens - 1) for s in whole if s.tokens > 1] or [float("nan")]
        rows.append((len(whole), *np.percentile(ttft, [50, 99]), *np.percentile(tpot, [50, 99])))
    return rows


def report(findings: dict[str, int | str], result: Soak, seconds: float) -> None:
    table = Table("measure", "value")
    for name, value in findings.items():
        table.add_row(name, str(value))
    for outcome, count in sorted(Counter(f"{seen.fate}: {seen.status}" for seen in result.seen).items()):
        table.add_row(outcome, str(count))
    console.print(table)
    table = Table("quarter", "whole streams", "TTFT p50, ms", "p99", "TPOT p50, ms", "p99")
    for number, (streams, *times) in enumerate(quarters(result, seconds), start=1):
        table.add_row(str(number), str(streams), *(f"{time:.1f}" for time in times))
    console.print(table)
    for wrong, count in Counter(seen.wrong for seen in result.seen if seen.wrong).most_common(5):
        console.print(f"{count} x {wrong}")


def draw(result: Soak, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    memory, latency, moved = figure.subplots(3, sharex=True)
    minutes = [sample.time_s / 60 for sample in result.samples]
    memory.plot(minutes, [sample.rss_mib for sample in result.samples])
    memory.set_ylabel("RSS, MiB")
    memory.set_ylim(0, 1.1 * max(sample.rss_mib for sample in result.samples))
    ttft = {m: [s.ttft_s * 1e3 for s in result.seen if s.fate == "whole" and s.sent_s // 60 == m] for m in range(10**3)}
    known = {m: np.nanpercentile(values, [50, 99]) for m, values in ttft.items() if values}
    latency.plot([m + 0.5 for m in known], [p50 for p50, _ in known.values()], label="median")
    latency.plot([m + 0.5 for m in known], [p99 for _, p99 in known.values()], label="p99")
    latency.set_ylabel("time to first token, ms")
    latency.legend(frameon=False)
    moved.plot(minutes, [sample.experts_moved for sample in result.samples])
    moved.set_ylabel("experts moved")
    moved.set_xlabel("minutes")
    for axes in (memory, latency, moved):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        typer.run(main)
