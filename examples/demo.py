"""The demo: a real trace through gRPC, once under a baseline and once under gimbal.

Makes a small checkpoint in out/demo-model, starts ``gimbal serve`` as a process of its own
for each run, replays the shipped trace, prints one table, and writes out/demo.png and
out/demo.json. The servers' logs are out/demo-*.log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.demo_report import RunReport, comparison_table, draw, expert_traffic
from gimbal_jax.bench.measurement import Measurement, Traffic, summarise
from gimbal_jax.bench.replay import (
    Call,
    conversation_topics,
    read_trace,
    replay,
    scale_trace,
)
from gimbal_jax.bench.server_process import running_server
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

# The trace was recorded on large GPUs: shorter and slower requests suit two CPU cores.
SLOWDOWN, INPUT_SCALE, OUTPUT_SCALE = 0.75, 1 / 2, 1 / 4
# Topics persist: eight conversations at a time, each of 25 requests on average.
CONVERSATIONS, CONVERSATION_END = 8, 0.04
SAMPLE_PERIOD_S = 2.0

console = Console()


def main() -> None:
    OUT.mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-m", "gimbal_jax.cli", "demo-model", MODEL], check=True, stdout=subprocess.DEVNULL)
    calls = make_calls()
    output_tokens = sum(call.max_tokens for call in calls)
    console.print(
        f"{len(calls)} requests over {calls[-1].arrival_s:.0f} s: "
        f"{sum(len(call.prompt) for call in calls):,} prompt tokens, {output_tokens:,} to generate"
    )
    results = [asyncio.run(run(name, policies, calls)) for name, policies in RUNS.items()]
    reports = [report for report, _ in results]
    console.print(comparison_table(reports))
    draw(reports, OUT / "demo.png")
    (OUT / "demo.json").write_text(json.dumps([details for _, details in results], indent=1))
    console.print(f"picture: {OUT / 'demo.png'}, all numbers: {OUT / 'demo.json'}", soft_wrap=True)


def make_calls() -> list[Call]:
    """The shipped trace, scaled, with prompts on persistent topics; the same ones each time."""
    with resources.as_file(resources.files("gimbal_jax") / "data" / "azure_llm_2023_conv.csv") as path:
        rows = scale_trace(
            read_trace(path)[:160], seconds=SLOWDOWN, input_tokens=INPUT_SCALE, output_tokens=OUTPUT_SCALE
        )
    tokenizer = load_tokenizer(MODEL)
    assert tokenizer is not None, f"{MODEL} has no tokenizer.json"
    rng = np.random.default_rng(0)
    topics = conversation_topics(len(rows), TOPICS, rng, conversations=CONVERSATIONS, end=CONVERSATION_END)
    return [
        Call(row.arrival_s, prompt_tokens(tokenizer, topic, row.input_tokens, rng), row.output_tokens, seed)
        for seed, (row, topic) in enumerate(zip(rows, topics, strict=True))
    ]


def prompt_tokens(tokenizer: Tokenizer, topic: str, count: int, rng: np.random.Generator) -> tuple[int, ...]:
    """Exactly ``count`` tokens of a topic: every word has at least one."""
    return tuple(tokenizer.encode(topic_prompt(topic, count, rng))[:count])


async def run(name: str, policies: Sequence[str], calls: Sequence[Call]) -> tuple[RunReport, dict[str, Any]]:
    """One replay against a server of its own: the report, and everything known about it for the JSON file."""
    log = OUT / f"demo-{name.split(',')[0]}.log"
    async with running_server(MODEL, (*MESH, *policies), log) as server, GimbalClient(server.target) as client:
        samples = [await sample(client)]
        sampler = asyncio.create_task(keep_sampling(client, samples))
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task(name, total=len(calls))
            measured = await replay(client, calls, on_done=lambda _: progress.advance(bar))
        sampler.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampler
        samples.append(await settled_sample(client))
        status = await client.status()
        placement = await client.placement()
        decisions = await client.decisions()

    layers = len(samples[-1].counts_LSE)
    counted = int((samples[-1].counts_LSE - samples[0].counts_LSE).sum())
    report = RunReport(
        name=name,
        ranks=placement.ranks,
        clients=summarise(measured),
        experts=expert_traffic(samples, placement.ranks),
        experts_moved=status.placement.experts_moved,
        tokens_counted=counted / (layers * load_config(MODEL).experts_per_token),
        tokens_served=tokens_served(measured),
    )
    details = {
        "name": name,
        "policies": policies,
        "clients": plain(report.clients),
        "imbalance": report.experts.imbalance,
        "remote_share": report.experts.remote_share,
        "server": plain(status),
        "tokens_counted": report.tokens_counted,
        "tokens_served": report.tokens_served,
        "placements": [plain(record) for record in decisions.placements],
        "requests": [plain(measurement) for measurement in measured],
    }
    return report, details


async def sample(client: GimbalClient) -> Traffic:
    placement = await client.placement()
    return Traffic(await client.counts("total"), placement.slot_of_expert_LE)


async def keep_sampling(client: GimbalClient, samples: list[Traffic]) -> None:
    while True:
        await asyncio.sleep(SAMPLE_PERIOD_S)
        samples.append(await sample(client))


async def settled_sample(client: GimbalClient) -> Traffic:
    """A sample after the last step: the counts of two in a row agree."""
    last = await sample(client)
    while True:
        await asyncio.sleep(0.5)
        now = await sample(client)
        if np.array_equal(now.counts_LSE, last.counts_LSE):
            return now
        last = now


def tokens_served(measured: Sequence[Measurement]) -> int:
    """Tokens that went through the model: all but the last one of each output."""
    return sum(m.input_tokens + m.output_tokens - 1 for m in measured if m.output_tokens)


def plain(record: Any) -> dict[str, Any]:
    """For JSON, which has no NaN."""
    return asdict(record, dict_factory=lambda items: {key: None if value != value else value for key, value in items})


if __name__ == "__main__":
    main()
