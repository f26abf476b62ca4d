"""Compare one server in several processes on one host with one process: its tokens, and the cost of commands.

    python -m benchmarks.processes [--rounds 3] [--model FOLDER] [--no-losses]

The demo model runs on four virtual CPU devices: one process with four, two with two, and four with one. Each server
gets the same greedy requests, streamed while the client asks for placement decisions, and then drains.

Processes share the host's cores, and collectives between them use loopback. The ratio of step times is therefore the
cost of processes and gloo on this host, not of a network of GPUs. Afterwards a follower, a leader and a follower again
are killed under load, each in a new server.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from gimbal_jax.bench.server_process import until_serving
from gimbal_jax.client.client import GimbalClient
from gimbal_jax.client.records import ClientError
from gimbal_jax.model.demo_model import write_demo_model
from gimbal_jax.model.hf_config import load_config
from gimbal_jax.serving.network.ports import free_port

OUT = Path("out/multihost")
SHAPES = ((1, 4), (2, 2), (4, 1))
"""(processes, devices of each process)."""
MESH = ("--dp", "2", "--tp", "2", "--min-gain", "0", "--smoothing", "0", "--max-queue", "512")
REQUESTS, OUTPUT_TOKENS = 64, 48
ASK_S = 0.5
KILL_AFTER_STEPS = 20
START_S, END_S = 900.0, 600.0
COMMANDS = re.compile(r"([\d,]+) commands .*: ([\d,]+) bytes, ([\d,]+) us")


@dataclass(frozen=True)
class Result:
    """Results of one run of a server, from its start to its drain."""

    answers: list[list[int]]
    step_ms: float
    """Wall-clock milliseconds per step under load."""
    experts_moved: int
    conserved: bool
    """Whether expert counts equal computed tokens times experts per token, in every layer and source."""
    compiles: int
    command: tuple[int, int] | None
    """Bytes of a command to one follower, and microseconds of a command to all. None without followers."""


@dataclass(frozen=True)
class Group:
    """The processes of one server. The first one leads."""

    running: list[subprocess.Popen[bytes]]
    logs: list[Path]
    target: str


@contextlib.asynccontextmanager
async def served(model: Path, processes: int, devices: int, *options: str) -> AsyncIterator[Group]:
    """Start a server, yield it once it serves, and kill it on exit. Its processes write their output to ``OUT``."""
    port = free_port()
    gimbal = [sys.executable, "-m", "gimbal_jax.cli", "serve", str(model), *MESH, "--devices", f"cpu:{devices}"]
    gimbal += ["--port", str(port), "--compile-cache", str(OUT / "compiled"), *options]
    if processes > 1:
        secret = OUT / "secret"
        secret.write_text("the secret of this report")
        secret.chmod(0o600)
        gimbal += ["--coordinator", f"127.0.0.1:{free_port()}", "--command-port", str(free_port())]
        gimbal += ["--processes", str(processes), "--secret-file", str(secret)]
    with contextlib.ExitStack() as stack:
        running, logs = [], [OUT / f"log-{processes}x{devices}-{index}" for index in range(processes)]
        for index, log in enumerate(logs):
            which = ["--process", str(index)] if processes > 1 else []
            output = stack.enter_context(log.open("w"))
            process = subprocess.Popen([*gimbal, *which], stdout=output, stderr=subprocess.STDOUT)
            stack.callback(process.wait)
            stack.callback(process.kill)
            running.append(process)
        target = f"127.0.0.1:{port}"
        await until_serving(target, running, START_S)
        yield Group(running, logs, target)


async def exit_codes(group: Group) -> list[int | None]:
    """Wait at most ``END_S`` seconds for all processes, and return their exit codes; None if still running."""
    deadline = time.monotonic() + END_S
    while None in (codes := [process.poll() for process in group.running]) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return codes


async def answer(client: GimbalClient, i: int, vocab_size: int) -> list[int]:
    """Return the greedy tokens of request ``i``."""
    rng = np.random.default_rng(i)
    prompt = rng.integers(vocab_size // 2, size=rng.integers(8, 100)).tolist()
    chunks = client.generate(token_ids=prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    return [token async for chunk in chunks for token in chunk.token_ids]


async def one_life(model: Path, processes: int, devices: int) -> Result:
    """Serve the requests while experts move, then drain."""
    config = load_config(model)

    async def ask() -> None:
        while True:
            await asyncio.sleep(ASK_S)
            await client.rebalance()

    async with served(model, processes, devices) as group:
        async with GimbalClient(group.target) as client:
            asking = asyncio.create_task(ask())
            began = time.monotonic()
            answers = await asyncio.gather(*(answer(client, i, config.vocab_size) for i in range(REQUESTS)))
            seconds = time.monotonic() - began
            asking.cancel()
            status, counts_LSE = await client.status(), await client.counts("total")
        group.running[0].send_signal(signal.SIGTERM)
        if any(codes := await exit_codes(group)):
            raise ChildProcessError(f"exit codes {codes} after a drain: must all be 0. See the logs in {OUT}")
    wanted_S = np.array([engine.tokens_computed for engine in status.engines]) * config.experts_per_token
    cost = COMMANDS.search(group.logs[0].read_text())
    return Result(
        answers,
        seconds / status.steps.count * 1e3,
        status.placement.experts_moved,
        bool((counts_LSE.sum(axis=2) == wanted_S).all()),
        status.steps.compiles_after_warmup,
        (_number(cost[2]), _number(cost[3])) if cost else None,
    )


def _number(text: str) -> int:
    return int(text.replace(",", ""))


async def one_loss(model: Path, index: int) -> tuple[str, ...]:
    """Kill one of two processes under load. Return a row of the table of results."""
    config, options = load_config(model), ("--placement-state", str(OUT / "placement.npz"))
    began = time.monotonic()
    async with served(model, 2, 2, *options) as group:
        start = time.monotonic() - began
        async with GimbalClient(group.target) as client:
            before = (await client.status()).steps.count
            streams = [asyncio.create_task(answer(client, i, config.vocab_size)) for i in range(REQUESTS)]
            while (await client.status()).steps.count < before + KILL_AFTER_STEPS:
                await asyncio.sleep(0.01)
            group.running[index].kill()
            killed = time.monotonic()
            ends = await asyncio.gather(*streams, return_exceptions=True)
            streams_ended = time.monotonic() - killed
            codes = await exit_codes(group)
            ended = time.monotonic() - killed
    errors = Counter(f"{error.code.name}: {error}" for error in ends if isinstance(error, ClientError))
    most, _ = errors.most_common(1)[0]
    return (
        "leader" if index == 0 else "follower",
        str(sum(isinstance(end, list) for end in ends)),
        f"{errors.total()}: {most[:120]}",
        f"{streams_ended:.1f}",
        f"{ended:.1f}",
        str(codes[1 - index]),
        f"{start:.1f}",
    )


def table(results: Mapping[tuple[int, int], Sequence[Result]]) -> str:
    """Return a table in Markdown. All shapes are compared with the first one."""
    alone = results[SHAPES[0]]
    columns = ("processes x devices", "same tokens", "counts conserved", "experts moved", "compiles", "ms a step")
    costs_of = ("of one process", "bytes a command and follower", "us a command")
    rows = []
    for (processes, devices), found in results.items():
        step = statistics.median(result.step_ms for result in found)
        ratio = statistics.median(result.step_ms / one.step_ms for result, one in zip(found, alone, strict=True))
        same = all(result.answers == alone[0].answers for result in found)
        commands = [result.command for result in found if result.command is not None]
        costs = [f"{statistics.median(values):,.0f}" for values in zip(*commands, strict=True)] or ["-", "-"]
        cells = [
            f"{processes} x {devices}",
            "yes" if same else "no",
            "yes" if all(result.conserved for result in found) else "no",
            str(min(result.experts_moved for result in found)),
            str(max(result.compiles for result in found)),
            f"{step:.1f}",
            f"{ratio:.2f}",
            *costs,
        ]
        rows.append(cells)
    return markdown((*columns, *costs_of), rows)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each shape.")] = 3,
    model: Annotated[Path | None, typer.Option(help="Checkpoint folder; default: the demo model.")] = None,
    losses: Annotated[bool, typer.Option(help="Also kill a follower, then a leader, under load.")] = True,
) -> None:
    """Print a table in Markdown. Exit with 1 if tokens differ, counts are lost or a program was compiled."""
    OUT.mkdir(parents=True, exist_ok=True)
    if model is None:
        model = OUT / "demo-model"
        if not model.exists():
            write_demo_model(model)
    results: dict[tuple[int, int], list[Result]] = {shape: [] for shape in SHAPES}
    for round_ in range(rounds):
        for shape in SHAPES:
            typer.echo(f"round {round_ + 1} of {rounds}: {shape[0]} processes with {shape[1]} devices", err=True)
            results[shape].append(asyncio.run(one_life(model, *shape)))
    typer.echo(table(results))
    if losses:
        rows = [asyncio.run(one_loss(model, index)) for index in (1, 0, 1)]
        columns = (
            "killed",
            "completed streams",
            "failed streams",
            "streams ended after, s",
            "ended after, s",
            "exit code of the other",
        )
        typer.echo(f"\n{markdown((*columns, 'start, s'), rows)}")
    found = [result for lives in results.values() for result in lives]
    good = all(r.answers == found[0].answers and r.conserved and not r.compiles for r in found)
    raise typer.Exit(0 if good else 1)


if __name__ == "__main__":
    typer.run(main)
