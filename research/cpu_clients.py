"""Clients of a server in this process: an open loop that replays arrivals, and a closed one that never lets it rest."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from gimbal_jax.bench.measurement import Measurement
from gimbal_jax.model.demo_model import TOPICS, topic_prompt
from gimbal_jax.serving.core.core import EngineCore
from gimbal_jax.serving.engine.request import SamplingParams
from gimbal_jax.serving.frontend.frontend import Frontend
from gimbal_jax.serving.text.tokenizer import load_tokenizer
from gimbal_jax.simulation.workload import Arrival
from research.cpu_engine import ENGINE, OUT

INPUT_SCALE, OUTPUT_SCALE, MOST_OUTPUT = 1 / 8, 1 / 8, 64
"""Traces were recorded on large GPUs: two CPU cores serve shorter requests. What is still too long is cut."""


Encode = Callable[[str], list[int]]
"""Text to token ids."""


@dataclass(frozen=True)
class Call:
    """A request to send ``arrival_s`` after the start."""

    arrival_s: float
    prompt: tuple[int, ...]
    output_tokens: int


def scaled(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The same requests, as short as two CPU cores serve them."""
    longest = ENGINE.max_model_len - MOST_OUTPUT
    return [
        replace(
            arrival,
            input_tokens=int(np.clip(arrival.input_tokens * INPUT_SCALE, 1, longest)),
            output_tokens=int(np.clip(arrival.output_tokens * OUTPUT_SCALE, 1, MOST_OUTPUT)),
        )
        for arrival in arrivals
    ]


def demo_encode() -> Encode:
    tokenizer = load_tokenizer(OUT / "demo-model")
    assert tokenizer is not None, "the demo model has one"
    return tokenizer.encode


def call_of(arrival: Arrival, encode: Encode, rng: np.random.Generator) -> Call:
    """A request of an arrival's lengths, in random words of its topic, each at least a token."""
    assert arrival.topic is not None, "no request has its source's own topic here"
    text = topic_prompt(TOPICS[arrival.topic], arrival.input_tokens, rng)
    return Call(arrival.time_s, tuple(encode(text)[: arrival.input_tokens]), arrival.output_tokens)


@contextmanager
def running(server: EngineCore) -> Iterator[EngineCore]:
    """The server with its engine thread, until the end of the block; its runner is warm."""
    server.start()
    try:
        while server.state == "warming":
            time.sleep(0.001)
        yield server
    finally:
        server.stop()


def open_loop(
    server: EngineCore, calls: Sequence[Call], on_done: Callable[[], None] = lambda: None
) -> list[Measurement]:
    """Send every call when it is due, whatever became of the others; what each client saw, in order.

    Times run from when a call was sent, which is ``arrival_s``: a millisecond or so late, as the event loop's timer is.
    """

    async def all_of_them() -> list[Measurement]:
        frontend = Frontend(server, time.monotonic)
        start = time.monotonic()

        async def one(number: int, call: Call) -> Measurement:
            await asyncio.sleep(start + call.arrival_s - time.monotonic())
            measurement = await _measure(frontend, number, call, start)
            on_done()
            return measurement

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(*numbered)) for numbered in enumerate(calls)]
        frontend.close()
        return [task.result() for task in tasks]

    return asyncio.run(all_of_them())


def closed_loop(server: EngineCore, calls: Sequence[Call], clients: int, seconds: float) -> float:
    """Requests per second where each of ``clients`` sends its next call, of those in turn, when its last one is done.

    The first quarter of the time does not count: the clients have just begun.
    """

    async def all_of_them() -> float:
        frontend = Frontend(server, time.monotonic)
        numbered = zip(itertools.count(), itertools.cycle(calls))
        start = time.monotonic()
        ends: list[float] = []

        async def client() -> None:
            while time.monotonic() < start + seconds:
                await _measure(frontend, *next(numbered), start)
                ends.append(time.monotonic())

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
        frontend.close()
        return sum(start + seconds / 4 < end <= start + seconds for end in ends) / (seconds * 3 / 4)

    return asyncio.run(all_of_them())


async def _measure(frontend: Frontend, number: int, call: Call, start: float) -> Measurement:
    """One stream, sent now, to its end; no token ends an output early."""
    sent, first, tokens = time.monotonic(), float("nan"), 0
    sampling = SamplingParams(call.output_tokens, temperature=0.0)
    with frontend.generate(str(number), call.prompt, sampling) as stream:
        async for delta in stream:
            if delta.token_ids and not tokens:
                first = time.monotonic()
            tokens += len(delta.token_ids)
    return Measurement(sent - start, len(call.prompt), tokens, first - sent, time.monotonic() - sent)
