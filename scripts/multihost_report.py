"""One server in several processes on one machine: are its tokens those of one process, and what do commands cost?

    python -m scripts.multihost_report [--rounds 3] [--model FOLDER]

Serves the demo model on four virtual CPU devices as one process with four, two with two and four with one, in turn.
Each gets the same greedy requests, streamed while a placement decision is asked for again and again, and then drains.
Processes share the machine's cores, and collectives between them go over loopback: the ratio of step times is what
processes and gloo cost here, not what a network of GPUs would.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from gimbal_jax.model.demo_model import write_demo_model
from gimbal_jax.model.hf_config import load_config
from gimbal_jax.serving.client import GimbalClient
from gimbal_jax.serving.server_process import RunningServer, free_port, running_server

OUT = Path("out/multihost")
SHAPES = ((1, 4), (2, 2), (4, 1))
"""(processes, devices of each)."""
MESH = ("--dp", "2", "--tp", "2", "--min-gain", "0", "--smoothing", "0", "--max-queue", "512")
REQUESTS, OUTPUT_TOKENS = 64, 48
ASK_S = 0.5
START_S, END_S = 900.0, 60.0
COMMANDS = re.compile(r"([\d,]+) commands .*: ([\d,]+) bytes, ([\d,]+) us")


@dataclass(frozen=True)
class Result:
    """One life of a server."""

    answers: list[list[int]]
    step_ms: float
    """Of all steps of the load, by the clock."""
    experts_moved: int
    conserved: bool
    """Whether the tokens counted are those computed, times experts per token, in every layer and source."""
    compiles: int
    command: tuple[int, int] | None
    """Bytes of one to one follower, and microseconds of one to all; None without followers."""


@contextlib.asynccontextmanager
async def served(model: Path, processes: int, devices: int) -> AsyncIterator[tuple[RunningServer, Path]]:
    """The leader, and what it prints. All processes must exit with 0 after the leader was told to stop."""
    options = [*MESH, "--devices", f"cpu:{devices}", "--compile-cache", str(OUT / "compiled")]
    log = OUT / f"log-{processes}x{devices}-0"
    with contextlib.ExitStack() as stack:
        followers = []
        if processes > 1:
            secret = OUT / "secret"
            secret.write_text("the secret of this report")
            secret.chmod(0o600)
            options += ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(processes)]
            options += ["--command-port", str(free_port()), "--secret-file", str(secret)]
        for index in range(1, processes):
            output = stack.enter_context(log.with_name(f"log-{processes}x{devices}-{index}").open("w"))
            gimbal = [sys.executable, "-m", "gimbal_jax.cli", "serve", str(model), *options, "--process", str(index)]
            follower = subprocess.Popen(gimbal, stdout=output, stderr=subprocess.STDOUT)
            stack.callback(follower.kill)
            followers.append(follower)
        options += ["--process", "0"] if processes > 1 else []
        async with running_server(model, options, log, START_S) as server:
            yield server, log
        codes = [await asyncio.to_thread(follower.wait, END_S) for follower in followers]
        if any(codes):
            raise ChildProcessError(f"followers exited with {codes}: see {log.parent}")


async def one_life(model: Path, processes: int, devices: int) -> Result:
    config = load_config(model)
    async with served(model, processes, devices) as (server, log), GimbalClient(server.target) as client:

        async def answer(i: int) -> list[int]:
            rng = np.random.default_rng(i)
            prompt = rng.integers(config.vocab_size // 2, size=rng.integers(8, 100)).tolist()
            chunks = client.generate(token_ids=prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
            return [token async for chunk in chunks for token in chunk.token_ids]

        async def ask() -> None:
            while True:
                await asyncio.sleep(ASK_S)
                await client.rebalance()

        asking = asyncio.create_task(ask())
        began = time.monotonic()
        answers = await asyncio.gather(*map(answer, range(REQUESTS)))
        seconds = time.monotonic() - began
        asking.cancel()
        status, counts_LSE = await client.status(), await client.counts("total")
    wanted_S = np.array(status.tokens_computed_S) * config.experts_per_token
    said = COMMANDS.search(log.read_text())
    return Result(
        answers,
        seconds / status.step * 1e3,
        status.experts_moved,
        bool((counts_LSE.sum(axis=2) == wanted_S).all()),
        status.compiles_after_warmup,
        (_number(said[2]), _number(said[3])) if said else None,
    )


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def table(results: Mapping[tuple[int, int], Sequence[Result]]) -> str:
    """In Markdown; the first shape is what the others are compared with."""
    alone = results[SHAPES[0]]
    columns = ["processes x devices", "same tokens", "counts conserved", "experts moved", "compiles", "ms a step"]
    columns += ["of one process", "bytes a command and follower", "us a command"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
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
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Lives of each shape, in turn.")] = 3,
    model: Annotated[Path | None, typer.Option(help="Checkpoint folder; default the demo model.")] = None,
) -> None:
    """Print a table in Markdown; exit code 1 where tokens differ, counts are lost or something was compiled."""
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
    found = [result for lives in results.values() for result in lives]
    good = all(r.answers == found[0].answers and r.conserved and not r.compiles for r in found)
    raise typer.Exit(0 if good else 1)


if __name__ == "__main__":
    typer.run(main)
