"""gimbal.v1.Control through a real socket and the client that reads it."""

import dataclasses
import time

import numpy as np

from tests.serving.fake_server import PLACEMENT, trace, with_server


@with_server()
async def test_placement(core, client):
    placement = await client.placement()
    np.testing.assert_array_equal(placement.slot_of_expert_LE, [[0, 1, 2, 3], [3, 2, 1, 0]])
    assert (placement.ranks, placement.sources) == (4, 2)


@with_server()
async def test_counts(core, client):
    window_LSE = await client.counts()
    np.testing.assert_array_equal(window_LSE, np.arange(16).reshape(2, 2, 4))
    np.testing.assert_array_equal(await client.counts("total"), window_LSE * 10)


@with_server()
async def test_traces(core, client):
    assert (await client.traces()).traces == ()
    core.traces = (trace(0, seen=3, running=1), trace(1, waiting=2, prefill=9))
    answer = await client.traces()
    assert answer.traces == core.traces
    assert 0 <= answer.now - core.traces[0].time <= time.monotonic() - core.traces[0].time


@with_server()
async def test_decisions(core, client):
    core.traces = (trace(0, prefill=5000), trace(1))
    for id in ("a", "b", "c"):
        async for _ in client.generate(token_ids=[1], max_tokens=1, request_id=id, engine=0 if id == "c" else None):
            pass
    answer = await client.decisions()
    assert [(record.request_id, record.engine, record.rule) for record in answer.dispatches] == [
        ("a", 1, "least_score"),
        ("b", 1, "least_score"),
        ("c", 0, "pinned"),
    ]
    first, _, pinned = answer.dispatches
    assert first.scores_S[0] > first.scores_S[1] and pinned.scores_S == ()
    assert first.time <= pinned.time <= answer.now
    assert answer.placements == (PLACEMENT,)
    assert (await client.decisions(last=2)).dispatches == answer.dispatches[1:]


@with_server()
async def test_status(core, client):
    status = await client.status()
    assert dataclasses.asdict(status) | {"now": 0} == {
        "now": 0,
        "state": "serving",
        "error": "",
        "step": 7,
        "tokens_computed_S": (11, 12),
        "free_pages_S": (30, 31),
        "preemptions": 1,
        "experts_moved": 3,
        "bytes_moved": 4096,
        "compiles_after_warmup": 0,
        "last_rebalance": None,
        "active_requests": 0,
    }
    core.last_rebalance = 0.0
    assert (await client.status()).last_rebalance == 0.0


@with_server()
async def test_rebalance(core, client):
    await client.rebalance()
    assert core.rebalances == 1
