import asyncio
import math
import selectors
from collections.abc import AsyncIterator
from importlib import resources
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from gimbal_jax.bench.measurement import Measurement, summarise
from gimbal_jax.bench.replay import (
    Call,
    TraceRow,
    Usage,
    conversation_topics,
    open_loop,
    read_trace,
    replay,
    scale_trace,
)
from gimbal_jax.client.records import Chunk, Overloaded
from tests.serving.fake_server import with_server

REFUSED, ABORTED = 98, 99  # seeds that the fake server treats so


def chunk(*token_ids: int, finish_reason: str | None = None) -> Chunk:
    return Chunk(token_ids, "", (), 0, 0, finish_reason=finish_reason)


class JumpingSelector(selectors.SelectSelector):
    """Never waits: its clock jumps to when the event loop would have woken up."""

    now = 0.0

    def select(self, timeout=None):
        self.now += timeout or 0.0
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        self.selector = JumpingSelector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


def run_in_virtual_time(calls, generate, **options) -> list[Measurement]:
    client: Any = SimpleNamespace(generate=generate)
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(replay(client, calls, clock=runner.get_loop().time, **options))


async def two_then_one(*, seed: int, **sampling) -> AsyncIterator[Chunk]:
    """First token after 0.5 s, two more 0.2 s later, in one chunk; the last chunk is empty."""
    assert sampling["temperature"] == 1.0 and sampling["ignore_eos"]
    if seed == REFUSED:
        await asyncio.sleep(0.1)
        raise Overloaded(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full")
    await asyncio.sleep(0.5)
    yield chunk(1)
    await asyncio.sleep(0.2)
    yield chunk(2, 3)
    yield chunk(finish_reason="length" if seed < ABORTED else "abort")


def test_replay_measures_each_call_from_its_due_time():
    calls = [Call(0.0, (1, 2), 3, seed=0), Call(0.1, (1,), 3, seed=REFUSED), Call(2.0, (1, 2, 3), 3, seed=ABORTED)]
    done: list[Measurement] = []
    measured = run_in_virtual_time(calls, two_then_one, on_done=done.append)
    assert [(m.input_tokens, m.output_tokens, m.error) for m in measured] == [
        (2, 3, ""),
        (1, 0, "queue full"),
        (3, 3, "finish_reason abort"),
    ]
    assert [m.ttft_s for m in measured] == pytest.approx([0.5, math.nan, 0.5], nan_ok=True)
    assert [m.tpot_s for m in measured] == pytest.approx([0.1, math.nan, 0.1], nan_ok=True)
    assert [m.e2e_s for m in measured] == pytest.approx([0.7, 0.1, 0.7])
    assert [m.gaps_s for m in measured] == [pytest.approx((0.2,)), (), pytest.approx((0.2,))]
    assert [m.arrival_s for m in done] == [0.1, 0.0, 2.0], "reported as they end"


def test_replay_sends_without_waiting_for_earlier_calls():
    running = most = 0

    async def slow(**sampling) -> AsyncIterator[Chunk]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(10.0)
        running -= 1
        yield chunk(1)

    run_in_virtual_time([Call(0.1 * i, (1,), 1, i) for i in range(20)], slow)
    assert most == 20


def test_a_call_that_is_sent_late_waited_since_it_was_due():
    loop = VirtualTimeLoop()

    async def send(call: Call, on_tokens) -> Usage:
        loop.selector.now += call.seed  # holds everything up for so many seconds
        await asyncio.sleep(0.25)
        on_tokens(1)
        return Usage(7, 1, 3)

    calls = [Call(0.0, (1,), 1, seed=2), Call(0.5, (1,), 1, seed=0)]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        first, late = runner.run(open_loop(calls, send, clock=loop.time))
    assert (first.ttft_s, late.ttft_s, late.e2e_s) == pytest.approx((2.25, 1.75, 1.75))
    assert (late.input_tokens, late.output_tokens, late.cached_tokens) == (7, 1, 3), "as the server says"


def test_replay_does_not_hide_other_errors():
    async def broken(**sampling) -> AsyncIterator[Chunk]:
        raise KeyError("bug")
        yield chunk()

    with pytest.raises(ExceptionGroup, match="unhandled errors"):
        run_in_virtual_time([Call(0.0, (1,), 1, 0)], broken)


@with_server({"max_queue": 3, "paused": True})
async def test_replay_over_grpc(core, client):
    calls = [Call(0.1 * i, (1, 2, 3 + i), 5, seed=i) for i in range(4)]

    def start_steps(refused: Measurement) -> None:
        core.paused = False

    measured = await replay(client, calls, on_done=start_steps)
    assert [m.output_tokens for m in measured] == [5, 5, 5, 0]
    assert "waiting requests" in measured[3].error
    assert all(0.0 < m.ttft_s < m.e2e_s for m in measured[:3])
    assert [request.sampling.seed for request in core.submitted] == [0, 1, 2]


def test_summary_by_hand():
    measured = [
        Measurement(0.0, 10, 3, ttft_s=1.0, e2e_s=3.0, gaps_s=(0.5, 1.5), cached_tokens=8),
        Measurement(1.0, 20, 1, ttft_s=2.0, e2e_s=2.0),
        Measurement(2.0, 30, 0, ttft_s=math.nan, e2e_s=6.0, error="lost", gaps_s=(9.0,), cached_tokens=5),
    ]
    summary = summarise(measured)
    assert (summary.requests, summary.failed, summary.seconds) == (3, 1, 8.0)
    assert (summary.ttft_mean_s, summary.ttft_p50_s, summary.ttft_p99_s) == pytest.approx((1.5, 1.5, 1.99))
    tpot = summary.tpot_mean_s, summary.tpot_p50_s, summary.tpot_p99_s
    assert tpot == (1.0, 1.0, 1.0), "a single token has no TPOT"
    assert (summary.itl_mean_s, summary.itl_p50_s, summary.itl_p99_s) == pytest.approx((1.0, 1.0, 1.49))
    assert (summary.e2e_mean_s, summary.e2e_p50_s, summary.e2e_p99_s) == pytest.approx((2.5, 2.5, 2.99))
    assert (summary.output_tokens_per_s, summary.tokens_per_s) == pytest.approx((4 / 8, 34 / 8))
    assert (summary.requests_per_s, summary.input_tokens, summary.output_tokens) == (2 / 8, 30, 4)
    assert summary.cached_tokens == 8


def test_summary_of_failures_only_is_not_a_number():
    summary = summarise([Measurement(0.0, 5, 0, math.nan, 1.0, "refused")])
    assert math.isnan(summary.ttft_mean_s) and math.isnan(summary.tpot_p99_s)
    assert summary.tokens_per_s == 0.0


def test_shipped_trace():
    with resources.as_file(resources.files("gimbal_jax") / "data" / "azure_llm_2023_conv.csv") as path:
        rows = read_trace(path)
    assert len(rows) == 19_366
    assert rows[0] == TraceRow(0.0, 374, 44)
    assert rows[159] == TraceRow(51.621, 833, 36)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("arrival_s,input_tokens,output_tokens\n0.0,1,1\n0.5,x,1\n", 3),
        ("arrival_s,input_tokens\n0.0,1\n", 2),
        ("arrival_s,input_tokens,output_tokens\n0.0,0,1\n", 2),
        ("arrival_s,input_tokens,output_tokens\n1.0,1,1\n0.5,1,1\n", 3),
    ],
)
def test_bad_trace_names_the_line(tmp_path, text, line):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"trace.csv:{line}: "):
        read_trace(path)


def test_scale_keeps_one_token_at_least():
    rows = scale_trace([TraceRow(2.0, 100, 3)], seconds=1.5, input_tokens=1 / 8, output_tokens=1 / 8)
    assert rows == (TraceRow(3.0, 12, 1),)


def test_topics_persist():
    topics = ["a", "b", "c", "d"]
    lasting = conversation_topics(400, topics, np.random.default_rng(0), conversations=1, end=0.02)
    changes = sum(a != b for a, b in pairwise(lasting))
    assert 1 <= changes <= 20, "about 400 * 0.02 * 3/4 = 6 are expected"
    fleeting = conversation_topics(400, topics, np.random.default_rng(0), conversations=1, end=1.0)
    assert sum(a != b for a, b in pairwise(fleeting)) > 200
    assert set(fleeting) == set(topics)
