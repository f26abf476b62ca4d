"""Replay a real trace through gRPC, in short rounds on a baseline and on gimbal alternately.

The demo writes a small checkpoint to out/demo-model and starts one ``gimbal serve`` process per set of policies. Every
round replays the same part of the shipped trace, first on the baseline and then on gimbal. The demo prints one table
and writes out/demo.png and out/demo.json. The servers log to out/demo-*.log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from examples.demo_report import RunReport, comparison_table, draw, expert_traffic, notes
from gimbal_jax.bench.measurement import Measurement, Traffic, summarise
from gimbal_jax.bench.replay import Call, conversation_topics, read_trace, replay, scale_trace
from gimbal_jax.bench.server_process import running_server
from gimbal_jax.cli.terminal import print_table, progress_bar
from gimbal_jax.client.client import GimbalClient
from gimbal_jax.model.demo_model import TOPICS, topic_prompt
from gimbal_jax.model.hf_config import load_config
from gimbal_jax.serving.text.tokenizer import Tokenizer, load_tokenizer

OUT = Path(__file__).resolve().parents[1] / "out"
MODEL = OUT / "demo-model"
MESH = ("--devices", "cpu:4", "--dp", "2", "--tp", "2")
RUNS = {
    "vllm_classic, fcfs, eplb": ("--dispatch", "vllm_classic", "--queue", "fcfs", "--placement", "eplb"),
    "gimbal": ("--dispatch", "gimbal", "--queue", "sjf_aging", "--placement", "gimbal"),
}

ROUNDS = 5
# A dense part of the trace. It was recorded on large GPUs, so requests are scaled down for two CPU cores.
STRETCH = slice(60, 84)
SLOWDOWN, INPUT_SCALE, OUTPUT_SCALE = 0.75, 1 / 2, 1 / 4
# Topics persist: eight conversations run at a time, and each has 25 requests on average.
CONVERSATIONS, CONVERSATION_END = 8, 0.04
SAMPLE_PERIOD_S = 2.0
START_TIMEOUT_S = 900.0
"""Timeout of a start. Compiling takes one or two minutes, and longer on a busy host."""

console = Console(highlight=False)


def main() -> None:
    OUT.mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-m", "gimbal_jax.cli", "demo-model", MODEL], check=True, stdout=subprocess.DEVNULL)
    rounds = make_rounds()
    tokens = sum(len(call.prompt) for call in rounds[0]), sum(call.max_tokens for call in rounds[0])
    console.print(
        f"{len(rounds)} rounds of {len(rounds[0])} requests over {rounds[0][-1].arrival_s:.0f} s each: "
        f"{tokens[0]:,} prompt tokens, {tokens[1]:,} to generate"
    )
    reports, details = asyncio.run(run(rounds))
    print_table(comparison_table(reports))
    for note in notes(reports):
        console.print(note)
    draw(reports, OUT / "demo.png")
    (OUT / "demo.json").write_text(json.dumps(details, indent=1))
    console.print(f"picture: {OUT / 'demo.png'}, all numbers: {OUT / 'demo.json'}", soft_wrap=True)


def make_rounds() -> list[list[Call]]:
    """Return the requests of each round: the same arrivals and lengths, and new prompts on persistent topics."""
    with resources.as_file(resources.files("gimbal_jax") / "data" / "azure_llm_2023_conv.csv") as path:
        rows = scale_trace(
            read_trace(path)[STRETCH], seconds=SLOWDOWN, input_tokens=INPUT_SCALE, output_tokens=OUTPUT_SCALE
        )
    tokenizer = load_tokenizer(MODEL)
    assert tokenizer is not None, f"{MODEL} has no tokenizer.json"
    rng = np.random.default_rng(0)
    count = ROUNDS * len(rows)
    topics = conversation_topics(count, TOPICS, rng, conversations=CONVERSATIONS, end=CONVERSATION_END)
    calls = []
    for seed, (row, topic) in enumerate(zip(rows * ROUNDS, topics, strict=True)):
        prompt = prompt_tokens(tokenizer, topic, row.input_tokens, rng)
        calls.append(Call(row.arrival_s - rows[0].arrival_s, prompt, row.output_tokens, seed))
    return [calls[start : start + len(rows)] for start in range(0, count, len(rows))]


def prompt_tokens(tokenizer: Tokenizer, topic: str, count: int, rng: np.random.Generator) -> tuple[int, ...]:
    """Return exactly ``count`` tokens on a topic, cut from ``count`` words of at least one token each."""
    return tuple(tokenizer.encode(topic_prompt(topic, count, rng))[:count])


@dataclass
class Side:
    """A server with one set of policies, and the measurements of its rounds so far."""

    name: str
    client: GimbalClient
    samples: list[Traffic]
    rounds: list[list[Measurement]] = field(default_factory=list)


async def run(rounds: Sequence[Sequence[Call]]) -> tuple[list[RunReport], list[dict[str, Any]]]:
    """Replay every round on each server. Return the reports and all details for the JSON file."""
    async with contextlib.AsyncExitStack() as stack:
        # The first server compiles. The others start later and read its compiled programs.
        sides = [await stack.enter_async_context(started(name, policies)) for name, policies in RUNS.items()]
        for number, calls in enumerate(rounds, start=1):
            for side in sides:
                await play(side, calls, f"round {number} of {len(rounds)}, {side.name}")
        found = [await report(side) for side in sides]
    return [report for report, _ in found], [details for _, details in found]


@contextlib.asynccontextmanager
async def started(name: str, policies: Sequence[str]) -> AsyncIterator[Side]:
    """Start a server, yield its side, and stop it on exit."""
    log = OUT / f"demo-{name.split(',')[0]}.log"
    async with contextlib.AsyncExitStack() as stack:
        with progress_bar(f"starting {name}"):
            options = (*MESH, *policies)
            server = await stack.enter_async_context(running_server(MODEL, options, log, START_TIMEOUT_S))
        client = await stack.enter_async_context(GimbalClient(server.target))
        yield Side(name, client, [await sample(client)])


async def play(side: Side, calls: Sequence[Call], what: str) -> None:
    """Replay one round on one server, and sample its counts during the round."""
    sampler = asyncio.create_task(keep_sampling(side))
    done = 0
    with progress_bar(what) as progress:

        def on_done(_: Measurement) -> None:
            nonlocal done
            done += 1
            progress(done, len(calls))

        side.rounds.append(await replay(side.client, calls, on_done=on_done))
    sampler.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sampler
    side.samples.append(await settled_sample(side.client))


async def sample(client: GimbalClient) -> Traffic:
    placement = await client.placement()
    return Traffic(await client.counts("total"), placement.slot_of_expert_LE)


async def keep_sampling(side: Side) -> None:
    while True:
        await asyncio.sleep(SAMPLE_PERIOD_S)
        side.samples.append(await sample(side.client))


async def settled_sample(client: GimbalClient) -> Traffic:
    """Return a sample after the last step, when the counts of two consecutive samples agree."""
    last = await sample(client)
    while True:
        await asyncio.sleep(0.5)
        now = await sample(client)
        if np.array_equal(now.counts_LSE, last.counts_LSE):
            return now
        last = now


async def report(side: Side) -> tuple[RunReport, dict[str, Any]]:
    """Return the report of a side, and all its details for the JSON file."""
    status = await side.client.status()
    placement = await side.client.placement()
    decisions = await side.client.decisions()
    first, last = side.samples[0].counts_LSE, side.samples[-1].counts_LSE
    result = RunReport(
        name=side.name,
        ranks=placement.ranks,
        rounds=tuple(summarise(measured) for measured in side.rounds),
        experts=expert_traffic(side.samples, placement.ranks),
        experts_moved=status.placement.experts_moved,
        preemptions=status.preemptions,
        tokens_counted=int((last - first).sum()) / (len(last) * load_config(MODEL).experts_per_token),
        tokens_served=tokens_served(chain.from_iterable(side.rounds)),
    )
    details = {
        "name": side.name,
        "policies": RUNS[side.name],
        "rounds": [
            {"clients": plain(clients), "requests": [plain(measurement) for measurement in measured]}
            for clients, measured in zip(result.rounds, side.rounds, strict=True)
        ],
        "imbalance_at_end": result.experts.imbalance_at_end,
        "imbalance": result.experts.imbalance,
        "remote_share": result.experts.remote_share,
        "server": plain(status),
        "tokens_counted": result.tokens_counted,
        "tokens_served": result.tokens_served,
        "placements": [plain(record) for record in decisions.placements],
    }
    return result, details


def tokens_served(measured: Iterable[Measurement]) -> int:
    """Return the number of tokens that the model had to compute, without cached ones and the last of each output."""
    return sum(m.input_tokens - m.cached_tokens + m.output_tokens - 1 for m in measured if m.output_tokens)


def plain(record: Any) -> dict[str, Any]:
    """Return a record as a dictionary for JSON, with None instead of NaN."""
    return asdict(record, dict_factory=lambda items: {key: None if value != value else value for key, value in items})


if __name__ == "__main__":
    main()
