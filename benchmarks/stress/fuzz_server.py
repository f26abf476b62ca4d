"""Send hostile requests to a running server while good clients continue.

    python -m benchmarks.stress.fuzz_server [--requests 10000] [--seed 0]

Starts ``gimbal serve`` on the demo model with its operators' port and gateway, and sends it hostile requests:

- messages to every gRPC method with hostile values in their fields, and bytes that are no message
- valid requests with one field out of its range, whose status is known
- prompts of 10 MB, clients that do not read, connections that stop half way
- malformed JSON over HTTP

Good clients send greedy requests at the same time, and must get the tokens of a quiet server. The script prints the
answers, and the KV pages, file handles and memory that the server did not release. It writes out/fuzz/fuzz.json. Exit
code 1 if there is any finding.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import grpc
import numpy as np
import typer
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.stress.checked_streams import TIE, Call, Sample, make_calls, one, quiet_answers, sample, settled
from benchmarks.stress.fuzz_requests import HOSTILE, RARE, TIMEOUT_S, Answer, Send, Target
from gimbal_jax.bench.server_process import running_server
from gimbal_jax.client.client import GimbalClient
from gimbal_jax.model.demo_model import write_demo_model
from gimbal_jax.serving.network.ports import free_port

OUT = Path("out/fuzz")
MODEL = OUT / "demo-model"
SERVER = ("--devices", "cpu:1", "--max-queue", "64")
BATCH = 20
"""Hostile requests sent at the same time."""
GOOD_CLIENTS, GOOD_REQUESTS = 3, 24

console = Console()


@dataclass
class Fuzz:
    """All answers and measurements of a run."""

    answers: list[Answer] = field(default_factory=list)
    good: Counter[str] = field(default_factory=Counter)
    """Number of good streams by result: "right", "tie" or an error."""
    rss_mib: list[float] = field(default_factory=list)
    """Resident memory of the server, sampled ten times in the run. Steady growth is a leak."""


def main(
    requests: Annotated[int, typer.Option(min=BATCH, help="Hostile requests to send.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
) -> None:
    """Send hostile requests while good clients continue, and print the results of both."""
    OUT.mkdir(parents=True, exist_ok=True)
    if not (MODEL / "config.json").exists():
        write_demo_model(MODEL)
    if not asyncio.run(fuzz(requests, seed)):
        raise typer.Exit(1)


async def fuzz(requests: int, seed: int) -> bool:
    operators_port, http_port = free_port(), free_port()
    options = (*SERVER, "--operators-port", str(operators_port), "--http-port", str(http_port))
    async with running_server(MODEL, options, OUT / "server.log") as server:
        host, _, port = server.target.rpartition(":")
        async with GimbalClient(server.target) as client, grpc.aio.insecure_channel(server.target) as channel:
            target = Target(channel, host, int(port), operators_port, http_port, MODEL.name)
            calls = await quiet_answers(client, make_calls(MODEL, GOOD_REQUESTS, np.random.default_rng(seed)), console)
            await settled(client)
            before = await sample(client, server.pid, 0.0)
            result = Fuzz()
            good = [asyncio.create_task(keep_asking(client, calls, result)) for _ in range(GOOD_CLIENTS)]
            good.append(asyncio.create_task(keep_weighing(client, server.pid, requests, result)))
            await asyncio.to_thread(send_batches, asyncio.get_running_loop(), target, requests, seed, result)
            for task in good:
                task.cancel()
            await asyncio.gather(*good, return_exceptions=True)
            await asyncio.wait_for(settled(client), 60)
            await asyncio.sleep(2)  # abandoned connections close in this time
            after = await sample(client, server.pid, 0.0)
    return report(result, before, after)


def send_batches(loop: asyncio.AbstractEventLoop, target: Target, requests: int, seed: int, result: Fuzz) -> None:
    """Draw the requests in this thread, because hypothesis blocks it, and send them in the event loop."""
    with Progress(console=console) as progress:
        bar = progress.add_task("hostile requests", total=requests)

        @hypothesis_seed(seed)
        @settings(
            max_examples=-(-requests // BATCH),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.lists(HOSTILE, min_size=BATCH - 1, max_size=BATCH - 1), RARE)
        def batch(common: list[Send], rare: Send) -> None:
            sends = [answer_of(send, target) for send in (*common, rare)]
            result.answers += asyncio.run_coroutine_threadsafe(all_of(sends), loop).result()
            progress.update(bar, completed=len(result.answers))

        batch()


async def all_of(answers: list[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    return list(await asyncio.gather(*answers))


async def answer_of(send: Send, target: Target) -> Answer:
    """Return the answer to one request. An exception or a missing answer is a finding."""
    try:
        async with asyncio.timeout(4 * TIMEOUT_S):
            return await send(target)
    except Exception as error:
        return Answer("no answer", type(error).__name__, f"{send.__qualname__}: {type(error).__name__}: {error}")


async def keep_weighing(client: GimbalClient, pid: int, requests: int, result: Fuzz) -> None:
    while True:
        if len(result.answers) >= len(result.rss_mib) * requests / 10:
            result.rss_mib.append((await sample(client, pid, 0.0)).rss_mib)
        await asyncio.sleep(0.5)


async def keep_asking(client: GimbalClient, calls: list[Call], result: Fuzz) -> None:
    """Send good requests one after the other. Each must return the tokens of the quiet run."""
    pick = random.Random(id(asyncio.current_task()))
    while True:
        seen = await one(client, pick.choice(calls), "whole", 0.0, 0.0, 0.0)
        result.good[seen.wrong or ("right" if seen.gap is None else "tie" if seen.gap <= TIE else "other tokens")] += 1


def report(result: Fuzz, before: Sample, after: Sample) -> bool:
    table = Table("hostile requests", "count", "answers")
    for kind in sorted({answer.kind for answer in result.answers}):
        statuses = Counter(answer.status for answer in result.answers if answer.kind == kind)
        table.add_row(kind, str(statuses.total()), ", ".join(f"{s} {n}" for s, n in statuses.most_common()))
    console.print(table)
    findings = Counter(f"{answer.kind}: {answer.finding}" for answer in result.answers if answer.finding)
    findings.update({f"good stream: {k}": n for k, n in result.good.items() if k not in ("right", "tie")})
    if before.free_pages != after.free_pages:
        findings[f"pages missing: {before.free_pages - after.free_pages}"] = 1
    if after.files > before.files + 3:
        findings[f"file handles left open: {after.files - before.files}"] = 1
    console.print(f"good streams: {dict(result.good)}")
    console.print(f"pages free {before.free_pages} -> {after.free_pages}, file handles {before.files} -> {after.files}")
    rss = ", ".join(f"{mib:.0f}" for mib in (*result.rss_mib, after.rss_mib))
    console.print(f"RSS, MiB: {rss}; {len(result.answers)} hostile requests")
    for text, count in findings.most_common(20):
        console.print(f"[red]{count} x[/] {text[:400]}", markup=True)
    numbers = {
        "answers": Counter(f"{answer.kind}: {answer.status}" for answer in result.answers),
        "good": result.good,
        "findings": findings,
        "before": asdict(before),
        "after": asdict(after),
    }
    (OUT / "fuzz.json").write_text(json.dumps(numbers, indent=1))
    return not findings


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        typer.run(main)
