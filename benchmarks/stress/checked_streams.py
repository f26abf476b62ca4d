"""Greedy streams whose tokens are known from a quiet run, and samples of the server process."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import grpc
import numpy as np
from rich.console import Console
from rich.progress import track
from smg_grpc_proto import vllm_engine_pb2 as pb

from gimbal_jax.client.client import GimbalClient
from gimbal_jax.model.demo_model import TOPICS, topic_prompt
from gimbal_jax.serving.text.tokenizer import load_tokenizer

TIE = 1e-3
"""Largest difference of two log probabilities that counts as a tie: rounding may decide a tie either way."""

Fate = Literal["whole", "cancelled", "late"]


@dataclass(frozen=True)
class Call:
    """A greedy request, and the tokens that a quiet server returns for it.

    ``gaps`` has, for each token, its log probability minus that of the second best token.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    expected: tuple[int, ...] = ()
    gaps: tuple[float, ...] = ()


@dataclass(frozen=True)
class Seen:
    """The stream that one client received. ``wrong`` describes missing or extra tokens; empty if there are none."""

    sent_s: float
    fate: Fate
    status: str
    tokens: int
    ttft_s: float
    e2e_s: float
    wrong: str
    gap: float | None
    """If the tokens differ from the quiet run: its gap at the first different token; None if they agree.

    Other batches and placements add in another order, so rounding may decide a tie differently. A gap larger than
    ``TIE`` means wrong tokens."""


@dataclass(frozen=True)
class Sample:
    """The server process and its state at one moment."""

    time_s: float
    rss_mib: float
    files: int
    free_pages: int
    active: int
    experts_moved: int
    preemptions: int


def make_calls(model: Path, count: int, rng: np.random.Generator) -> list[Call]:
    """Return ``count`` requests with short and long prompts on the demo model's topics."""
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None, "the demo model has one"
    calls = []
    for _ in range(count):
        words = int(rng.integers(8, 160))
        text = topic_prompt(str(rng.choice(TOPICS)), words, rng)
        calls.append(Call(tuple(tokenizer.encode(text)[:words]), int(rng.integers(4, 65))))
    return calls


def request_of(call: Call, logprobs: int | None = None) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=call.prompt),
        sampling_params=pb.SamplingParams(
            temperature=0, max_tokens=call.max_tokens, ignore_eos=True, logprobs=logprobs
        ),
        stream=True,
    )


async def quiet_answers(client: GimbalClient, calls: list[Call], console: Console) -> list[Call]:
    """Send the calls one at a time, and return them with their tokens and gaps."""
    answered = []
    for call in track(calls, "a quiet run", console=console):
        *_, last = [response async for response in client.engine.Generate(request_of(call, logprobs=2))]
        gaps = tuple(top.values[0] - top.values[1] for top in last.complete.output_logprobs.top_logprobs)
        answered.append(replace(call, expected=tuple(last.complete.output_ids), gaps=gaps))
    return answered


async def one(client: GimbalClient, call: Call, fate: Fate, patience: float, start: float, due: float) -> Seen:
    """Run one stream and check it.

    Args:
        patience: In [0, 1). Share of the tokens after which a "cancelled" client leaves. A "late" client has a
            deadline of 0.02 + ``patience`` seconds.
        start, due: Monotonic seconds at which the run started and at which this request was due.
    """
    timeout = 0.02 + patience if fate == "late" else None
    leave_after = int(patience * call.max_tokens) if fate == "cancelled" else None
    tokens: list[int] = []
    first, status, wrong = float("nan"), "OK", ""
    stream = client.engine.Generate(request_of(call), timeout=timeout)
    try:
        async for response in stream:
            if response.HasField("chunk"):
                if not tokens:
                    first = time.monotonic() - due
                tokens += response.chunk.token_ids
                if response.chunk.completion_tokens != len(tokens):
                    wrong = f"{len(tokens)} tokens arrived, the server counts {response.chunk.completion_tokens}"
                if leave_after is not None and len(tokens) > leave_after:
                    status = "left"
                    break
            elif tuple(response.complete.output_ids) != tuple(tokens):
                wrong = "the last message has other tokens than the stream"
            elif len(tokens) != call.max_tokens:
                wrong = f"{len(tokens)} tokens of {call.max_tokens}"
    except grpc.aio.AioRpcError as error:
        status = error.code().name
        if not (fate == "late" and status == "DEADLINE_EXCEEDED"):
            wrong = f"{status}: {error.details()}"
    finally:
        stream.cancel()
    gap = next((gap for ours, quiet, gap in zip(tokens, call.expected, call.gaps, strict=False) if ours != quiet), None)
    return Seen(due - start, fate, status, len(tokens), first, time.monotonic() - due, wrong, gap)


async def sample(client: GimbalClient, pid: int, time_s: float) -> Sample:
    status = await client.status()
    process = Path("/proc") / str(pid)
    rss = next(line for line in (process / "status").read_text().splitlines() if line.startswith("VmRSS"))
    return Sample(
        time_s,
        int(rss.split()[1]) / 1024,
        len(list((process / "fd").iterdir())),
        sum(engine.free_pages for engine in status.engines),
        status.active_requests,
        status.placement.experts_moved,
        status.preemptions,
    )


async def settled(client: GimbalClient) -> None:
    """Wait until no request is left in the frontend or in an engine."""
    while True:
        status, traces = await client.status(), (await client.traces()).traces
        if not status.active_requests and not any(t.running_requests + t.waiting_requests for t in traces):
            return
        await asyncio.sleep(0.2)
