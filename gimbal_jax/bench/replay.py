"""Replay of request traces against a running server, measured by its clients."""

from __future__ import annotations

import asyncio
import csv
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from gimbal_jax.bench.measurement import Measurement
from gimbal_jax.client.client import GimbalClient
from gimbal_jax.client.records import ClientError


@dataclass(frozen=True)
class TraceRow:
    """One request of a recorded trace."""

    arrival_s: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Call:
    """One request, due ``arrival_s`` seconds after the start of the replay."""

    arrival_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int


def read_trace(path: Path) -> tuple[TraceRow, ...]:
    """Read a CSV with columns arrival_s, input_tokens, output_tokens. Raises ValueError that names a bad line."""
    rows: list[TraceRow] = []
    with path.open(newline="") as file:
        for line, record in enumerate(csv.DictReader(file), start=2):
            try:
                row = TraceRow(float(record["arrival_s"]), int(record["input_tokens"]), int(record["output_tokens"]))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}:{line}: needs arrival_s, input_tokens, output_tokens; got {record}"
                ) from error
            if row.input_tokens < 1 or row.output_tokens < 1 or row.arrival_s < (rows[-1].arrival_s if rows else 0.0):
                raise ValueError(f"{path}:{line}: lengths must be at least 1 and arrivals must not fall, got {record}")
            rows.append(row)
    return tuple(rows)


def scale_trace(
    rows: Sequence[TraceRow], *, seconds: float, input_tokens: float, output_tokens: float
) -> tuple[TraceRow, ...]:
    """Multiply arrivals and lengths. Lengths are rounded and stay at least 1."""
    return tuple(
        TraceRow(
            row.arrival_s * seconds,
            max(1, round(row.input_tokens * input_tokens)),
            max(1, round(row.output_tokens * output_tokens)),
        )
        for row in rows
    )


def conversation_topics(
    count: int, topics: Sequence[str], rng: np.random.Generator, *, conversations: int, end: float
) -> tuple[str, ...]:
    """Draw a topic for each of ``count`` requests, so that topics persist (rule: ours).

    ``conversations`` run in parallel, each on one topic. A request belongs to a random one of them. After the
    request, this conversation ends with probability ``end``. A new one on a newly drawn topic then replaces it.
    """
    going = list(rng.choice(topics, conversations))
    drawn = []
    for _ in range(count):
        index = rng.integers(conversations)
        drawn.append(str(going[index]))
        if rng.random() < end:
            going[index] = rng.choice(topics)
    return tuple(drawn)


OnTokens = Callable[[int], None]
"""Called with the number of tokens of each message that has tokens, on arrival."""


@dataclass(frozen=True)
class Usage:
    """Token counts that the server reports for a request that succeeded."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int


class SendFailed(Exception):
    """A request was rejected, was aborted or ended too early. The text describes how."""


async def open_loop(
    calls: Sequence[Call],
    send: Callable[[Call, OnTokens], Awaitable[Usage]],
    *,
    on_done: Callable[[Measurement], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Measurement]:
    """Send every call when it is due, wait for all, and return a measurement per call, in order.

    Calls never wait for each other. ``send`` returns at the end of the stream. A ``SendFailed`` becomes the ``error``
    of its call.
    """
    start = clock()

    async def run(call: Call) -> Measurement:
        due = start + call.arrival_s
        await asyncio.sleep(due - clock())
        times: list[float] = []
        tokens = 0

        def on_tokens(count: int) -> None:
            nonlocal tokens
            times.append(clock())
            tokens += count

        try:
            usage, error = await send(call, on_tokens), ""
        except SendFailed as failed:
            usage, error = Usage(len(call.prompt), tokens, 0), str(failed)
        done = Measurement(
            arrival_s=call.arrival_s,
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            ttft_s=times[0] - due if times else float("nan"),
            e2e_s=clock() - due,
            error=error,
            gaps_s=tuple(later - earlier for earlier, later in pairwise(times)),
            cached_tokens=usage.cached_tokens,
        )
        on_done(done)
        return done

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(call)) for call in calls]
    return [task.result() for task in tasks]


async def replay(
    client: GimbalClient,
    calls: Sequence[Call],
    *,
    on_done: Callable[[Measurement], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Measurement]:
    """Run ``open_loop`` through a client. Tokens are sampled at temperature 1, and no token ends an output early."""

    async def send(call: Call, on_tokens: OnTokens) -> Usage:
        tokens = cached = 0
        stream = client.generate(
            token_ids=call.prompt, max_tokens=call.max_tokens, temperature=1.0, seed=call.seed, ignore_eos=True
        )
        try:
            async for chunk in stream:
                if chunk.token_ids:
                    on_tokens(len(chunk.token_ids))
                    tokens += len(chunk.token_ids)
                cached = chunk.cached_tokens
                if chunk.finish_reason not in (None, "length"):
                    raise SendFailed(f"finish_reason {chunk.finish_reason}")
        except ClientError as error:
            raise SendFailed(str(error)) from error
        return Usage(len(call.prompt), tokens, cached)

    return await open_loop(calls, send, on_done=on_done, clock=clock)
