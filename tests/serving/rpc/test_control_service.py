"""gimbal.v1.Control through a real socket and the client that reads it."""

import time

import numpy as np
import pytest

from gimbal_jax.scheduler.counts_file import load_counts
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


def test_counts_to_a_file(tmp_path):
    @with_server()
    async def run(core, client):
        for scope, factor in ("window", 1), ("total", 10):
            await client.save_counts(tmp_path / f"{scope}.npz", scope)
            file = load_counts(tmp_path / f"{scope}.npz")
            np.testing.assert_array_equal(file.counts_WLSE, np.arange(16).reshape(1, 2, 2, 4) * factor)
            np.testing.assert_array_equal(file.slot_of_expert_WLE, [[[0, 1, 2, 3], [3, 2, 1, 0]]])
            assert (file.ranks, file.meta["scope"], file.meta["step"]) == (4, scope, 7)

    run()


@with_server()
async def test_traces(core, client):
    assert (await client.traces()).traces == ()
    core.traces = (trace(0, seen=3, running=1), trace(1, waiting=2, prefill=9))
    answer = await client.traces()
    assert answer.traces == core.traces
    assert answer.central_queue == 0
    core.central_queue = 3
    assert (await client.traces()).central_queue == (await client.status()).central_queue == 3
    assert 0 <= answer.now - core.traces[0].time <= time.monotonic() - core.traces[0].time


@with_server()
async def test_decisions(core, client):
    core.traces = (trace(0, prefill=5000), trace(1))
    for id in ("a", "b", "c"):
        async for _ in client.generate(token_ids=[1], max_tokens=1, request_id=id, engine=0 if id == "c" else None):
            pass
    answer = await client.decisions()
    assert [(record.request_id, record.decision.engine, record.decision.rule) for record in answer.dispatches] == [
        ("a", 1, "least_score"),
        ("b", 1, "least_score"),
        ("c", 0, "pinned"),
    ]
    first, _, pinned = answer.dispatches
    # T_ref is the default token budget, 512; pressures of 1 and 2: engine 1 is a third above their mean
    assert first.decision.terms == {
        "running_prefill": (0, 0),
        "waiting_prefill": (5000, 0),
        "compensation": (0, 0),
        "kv": (128, 128),
        "experts": (0, pytest.approx(512 / 3)),
    }
    assert first.decision.scores_S[0] == 5128 and pinned.decision.terms == {}
    assert first.decision.explain().startswith("engine 1 by least_score\n  engine 0: 5128 = 5000 waiting_prefill")
    assert first.time <= pinned.time <= answer.now
    assert answer.placements == (PLACEMENT,)
    assert (await client.decisions(last=2)).dispatches == answer.dispatches[1:]


@with_server()
async def test_status(core, client):
    status = await client.status()
    wanted = core.status()
    assert (status.state, status.error, status.active_requests, status.central_queue) == ("serving", "", 0, 0)
    assert (status.engines, status.steps) == (wanted.engines, wanted.steps)
    assert (status.placement, status.preemptions) == (wanted.placement.totals, 1)
    assert status.placement.last_rebalance is None
    core.last_rebalance = 0.0
    assert (await client.status()).placement.last_rebalance == 0.0


@with_server()
async def test_rebalance(core, client):
    await client.rebalance()
    assert core.rebalances == 1
