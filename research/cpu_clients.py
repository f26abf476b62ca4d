"""Clients of a server in this process: an open loop that replays arrivals, and a closed loop that keeps it busy."""

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
from research.cpu_engine import ENGINE
from research.store import OUT

INPUT_SCALE, OUTPUT_SCALE, MOST_OUTPUT = 1 / 8, 1 / 8, 64
"""Factors on the lengths of requests, and the most output tokens.

Traces were recorded on large GPUs, and two CPU cores serve shorter requests. Lengths above the limits are cut.
"""


Encode = Callable[[str], list[int]]
"""Function from text to token ids."""


@dataclass(frozen=True)
class Call:
    """A request to send ``arrival_s`` after the start."""

    arrival_s: float
    prompt: tuple[int, ...]
    output_tokens: int


def scaled(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Return the requests with lengths that two CPU cores can serve."""
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
    assert tokenizer is not None, "the demo model has a tokenizer"
    return tokenizer.encode


def call_of(arrival: Arrival, encode: Encode, rng: np.random.Generator) -> Call:
    """Return a request with the lengths of an arrival. Its prompt is random words of its topic."""
    assert arrival.topic is not None, "every request here has a topic, none its source's own"
    text = topic_prompt(TOPICS[arrival.topic], arrival.input_tokens, rng)
    return Call(arrival.time_s, tuple(encode(text)[: arrival.input_tokens]), arrival.output_tokens)


@contextmanager
def running(server: EngineCore) -> Iterator[EngineCore]:
    """Start the server's engine thread, wait for the warm-up, and stop the server at the end of the block."""
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
    """Send each call when it is due, independently of the others, and return the measurements in order of the calls.

    Times start when a call is sent, which is about a millisecond after ``arrival_s`` because of the event loop's timer.
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
    """Return requests per second of ``clients`` clients, each of which sends its next call when its last one is done.

    The clients share one cycle through ``calls``. The first quarter of the time is a warm-up and does not count.
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
    """Send one request now and measure its stream to the end. No token ends the output early."""
    sent, first, tokens = time.monotonic(), float("nan"), 0
    sampling = SamplingParams(call.output_tokens, temperature=0.0)
    with frontend.generate(str(number), call.prompt, sampling) as stream:
        async for delta in stream:
            if delta.token_ids and not tokens:
                first = time.monotonic()
            tokens += len(delta.token_ids)
    return Measurement(sent - start, len(call.prompt), tokens, first - sent, time.monotonic() - sent)
