"""What OpenAI's HTTP API by the smg gateway costs over plain gRPC, on this machine.

One server with the demo model and both surfaces; the same greedy requests go to either in turns, so many streams at
once, each of a prompt of its own. gRPC gets and gives tokens; HTTP text, which the gateway tokenizes and decodes. Both
clients do as little as they can: they read the stream, and note when its first piece and its end came. Server, gateway
and clients share the cores.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from smg_grpc_proto import vllm_engine_pb2 as pb

from gimbal_jax.bench.server_process import free_port, running_server
from gimbal_jax.client.client import GimbalClient
from gimbal_jax.model.demo_model import TOPICS, topic_prompt, write_demo_model
from gimbal_jax.serving.text.tokenizer import Tokenizer, load_tokenizer

OUT = Path(__file__).resolve().parents[1] / "out"
MODEL, NAME = OUT / "demo-model", "demo"
STREAMS = 1, 16, 64
PROMPT_WORDS = 32
SERVER = ("--devices", "cpu:1", "--max-rows", "64", "--served-model-name", NAME, "--log-format", "off")

console = Console()


@dataclass(frozen=True)
class Seen:
    """What a client saw of one stream."""

    first_s: float
    total_s: float


Send = Callable[[str], Awaitable[Seen]]


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each number of streams, on either surface.")] = 10,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 32,
) -> None:
    """Write a table, and all medians to out/http_cost.json."""
    write_demo_model(MODEL)
    rows = asyncio.run(measure(rounds, max_tokens))
    table = Table("streams", "to first token, ms: gRPC", "HTTP", "ratio", "to the end, ms: gRPC", "HTTP", "ratio")
    for row in rows:
        table.add_row(str(row["streams"]), *(f"{value:.2f}" for name, value in row.items() if name != "streams"))
    console.print(table)
    (OUT / "http_cost.json").write_text(json.dumps(rows, indent=1))


async def measure(rounds: int, max_tokens: int) -> list[dict[str, float]]:
    http_port = free_port()
    tokenizer = load_tokenizer(MODEL)
    assert tokenizer is not None
    options = (*SERVER, "--http-port", str(http_port))
    async with running_server(MODEL, options, OUT / "http_cost.log") as server, GimbalClient(server.target) as client:
        surfaces: dict[str, Send] = {
            "grpc": lambda prompt: by_grpc(client, tokenizer, prompt, max_tokens),
            "http": lambda prompt: by_http(http_port, prompt, max_tokens),
        }
        return [await compare(surfaces, streams, rounds) for streams in STREAMS]


async def compare(surfaces: dict[str, Send], streams: int, rounds: int) -> dict[str, float]:
    """Medians of the rounds' medians, in ms, and of their ratios within a round."""
    rng = np.random.default_rng(streams)
    first: dict[str, list[float]] = {name: [] for name in surfaces}
    total: dict[str, list[float]] = {name: [] for name in surfaces}
    for number in range(rounds + 1):
        prompts = [topic_prompt(TOPICS[i % len(TOPICS)], PROMPT_WORDS, rng) for i in range(streams)]
        order = list(surfaces) if number % 2 else list(surfaces)[::-1]
        for name in order:
            seen = await asyncio.gather(*(surfaces[name](prompt) for prompt in prompts))
            if number:  # the first round warms up
                first[name].append(1e3 * median(one.first_s for one in seen))
                total[name].append(1e3 * median(one.total_s for one in seen))
    row: dict[str, float] = {"streams": streams}
    for what, times in (("first", first), ("total", total)):
        row |= {f"{what}_{name}_ms": median(times[name]) for name in surfaces}
        row[f"{what}_ratio"] = median(http / grpc for grpc, http in zip(times["grpc"], times["http"], strict=True))
    return row


async def by_grpc(client: GimbalClient, tokenizer: Tokenizer, prompt: str, max_tokens: int) -> Seen:
    request = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=tokenizer.encode(prompt)),
        sampling_params=pb.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        stream=True,
    )
    began, first, tokens = time.perf_counter(), 0.0, 0
    async for response in client.engine.Generate(request):
        if response.HasField("chunk"):
            first = first or time.perf_counter()
            tokens += len(response.chunk.token_ids)
    assert tokens == max_tokens
    return Seen(first - began, time.perf_counter() - began)


async def by_http(port: int, prompt: str, max_tokens: int) -> Seen:
    body = json.dumps(
        {
            "model": NAME,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    headers = "Host: localhost", "Content-Type: application/json", "Connection: close", f"Content-Length: {len(body)}"
    head = "\r\n".join(("POST /v1/completions HTTP/1.1", *headers, "", ""))
    began, first, usage = time.perf_counter(), 0.0, ""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    async for line in reader:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter()
            usage = line.decode()
    ended = time.perf_counter()
    writer.close()
    assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == max_tokens, usage
    return Seen(first - began, ended - began)


if __name__ == "__main__":
    typer.run(main)
