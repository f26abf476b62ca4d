"""A benchmark of a running server: rounds of requests through its gRPC or HTTP surface."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import grpc
import numpy as np
from smg_grpc_proto import vllm_engine_pb2 as pb

from gimbal_jax.bench.clients import Send, grpc_send, http_model, http_send
from gimbal_jax.bench.load import LoadConfig, lengths_of, make_calls, one_token_words
from gimbal_jax.bench.measurement import Summary, summarise
from gimbal_jax.bench.replay import open_loop
from gimbal_jax.bench.server_process import cpu_seconds
from gimbal_jax.client.client import GimbalClient
from gimbal_jax.client.records import ClientError
from gimbal_jax.serving.engine.meters import PhaseTimes

Kind = Literal["warmup", "offline", "online"]
Progress = Callable[[int, int], None]
SHARE = 0.7
"""Share of capacity for an online load without a rate or a share."""


@dataclass(frozen=True)
class Surface:
    """Address of the server, and the way in which requests travel to it."""

    name: Literal["grpc", "http"]
    address: str
    model: str
    prompts: str
    """Description of the prompts for the report."""
    token_ids: np.ndarray
    """Token ids that prompts are drawn from."""
    send: Send
    phases: Callable[[], Awaitable[tuple[PhaseTimes, ...]]] | None = None
    """Function that fetches the server's profile; None if the surface has no profile."""
    pid: int | None = None
    """Process id of the server; None if it is not our child."""


@dataclass(frozen=True)
class Round:
    """One round of requests with its measurements."""

    kind: Kind
    number: int
    rate: float | None
    """Requests per second that were due; None if all were due at 0."""
    summary: Summary
    client_cpu_s: float
    """CPU time of this process, which may have taken it from the server."""
    server_cpu_s: float | None
    """CPU time of the server, without its gateway; None if it is not our child."""
    phases: tuple[PhaseTimes, ...]
    """Profile of the server after the round; empty if none was requested."""
    errors: tuple[str, ...]
    """The different error texts of failed requests."""


@contextlib.asynccontextmanager
async def grpc_surface(target: str, pid: int | None = None) -> AsyncIterator[Surface]:
    """Yield the gRPC surface of a running server. Raises ClientError if no server answers."""
    async with GimbalClient(target) as client:
        try:
            info = await client.engine.GetModelInfo(pb.GetModelInfoRequest())
        except grpc.aio.AioRpcError as error:
            raise ClientError(error.code(), error.details() or "") from error

        async def phases() -> tuple[PhaseTimes, ...]:
            return (await client.status()).steps.phases

        words = await _words(client)
        special = {*info.eos_token_ids, info.pad_token_id}
        token_ids = list(words) or [id for id in range(info.vocab_size) if id not in special]
        prompts = f"token ids of {'words' if words else 'the whole vocabulary'}"
        name = info.served_model_name or info.model_path
        yield Surface("grpc", target, name, prompts, np.array(token_ids), grpc_send(client), phases, pid)


async def _words(client: GimbalClient) -> dict[int, str]:
    """Return words of one token by token id, empty if the server has no tokenizer."""
    try:
        tokenizer = await client.tokenizer()
    except ClientError as error:
        if error.code is grpc.StatusCode.NOT_FOUND:
            return {}
        raise
    return one_token_words(tokenizer.json)


async def http_surface(url: str, tokenizer_json: str, pid: int | None = None) -> Surface:
    """Return the HTTP surface. Raises SendFailed if no server names a model, ValueError for a bad url or tokenizer."""
    words = one_token_words(tokenizer_json)
    model = await http_model(url)
    send = http_send(url, model, words)
    return Surface("http", url, model, "text of words that are one token each", np.array(list(words)), send, pid=pid)


@dataclass(frozen=True)
class Rate:
    """Rate of online requests: per second, or as a share of the rate that the offline rounds before reached."""

    value: float
    of_capacity: bool


def rate_of(load: Literal["offline", "online"], rate: float | None, share: float | None) -> Rate | None:
    """Return the rate of an online load, None for an offline load. Raises ValueError that names the flag."""
    if load == "offline":
        if rate is not None or share is not None:
            raise ValueError("--rate and --share are for --load online")
        return None
    if rate is not None and share is not None:
        raise ValueError("--rate and --share both set the rate: give one of them")
    for name, value in (("--rate", rate), ("--share", share)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, not {value:g}")
    return Rate(rate, False) if rate is not None else Rate(SHARE if share is None else share, True)


async def measure(
    surface: Surface,
    load: LoadConfig,
    rate: Rate | None = None,
    *,
    profile: bool = False,
    progress: Progress = lambda done, total: None,
) -> list[Round]:
    """Run all rounds and return them in order: warm-up, offline unless the rate is known, online if there is a rate.

    If ``rate`` is a share of capacity and the offline rounds served no request, no online round runs.
    """
    lengths = lengths_of(load)
    offline = rate is None or rate.of_capacity
    total = (load.warmup + load.rounds * (offline + (rate is not None))) * load.requests
    done: list[Round] = []
    finished = 0

    def on_done(_: object) -> None:
        nonlocal finished
        finished += 1
        progress(finished, total)

    async def run(kind: Kind, number: int, per_second: float | None = None) -> None:
        calls = make_calls(load, lengths, surface.token_ids, kind=kind, round_number=number, rate=per_second)
        server_cpu, client_cpu = _cpu(surface), time.process_time()
        measurements = await open_loop(calls, surface.send, on_done=on_done)
        client_cpu = time.process_time() - client_cpu
        after = _cpu(surface)
        done.append(
            Round(
                kind,
                number,
                per_second,
                summarise(measurements),
                client_cpu,
                None if after is None or server_cpu is None else after - server_cpu,
                await surface.phases() if profile and surface.phases is not None else (),
                tuple(sorted({m.error for m in measurements if m.error})),
            )
        )

    progress(0, total)
    for number in range(load.warmup):
        await run("warmup", number)
    if offline:
        for number in range(load.rounds):
            await run("offline", number)
    if rate is not None:
        capacity = median(r.summary.requests_per_s for r in done if r.kind == "offline") if rate.of_capacity else 1.0
        if capacity:
            for number in range(load.rounds):
                await run("online", number, rate.value * capacity)
    return done


def _cpu(surface: Surface) -> float | None:
    return None if surface.pid is None else cpu_seconds(surface.pid)


def median_summary(summaries: Sequence[Summary]) -> dict[str, float]:
    """Return the median of each field, over the rounds in which it is not NaN."""
    values = {name: [v for s in summaries if not math.isnan(v := getattr(s, name))] for name in Summary.__annotations__}
    return {name: float(median(known)) if known else float("nan") for name, known in values.items()}
