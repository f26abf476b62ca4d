"""The frontend over a fake core, without sockets: dispatch, routing, records, ends of every kind."""

import asyncio
import dataclasses
import functools
import time

import pytest

from gimbal_jax.config import DispatchConfig
from gimbal_jax.exceptions import GenerationFailed, NotServing, QueueFull
from gimbal_jax.scheduler.dispatch_decision import Decision, DispatchRecord
from gimbal_jax.serving.engine.prefix import page_hashes
from gimbal_jax.serving.engine.request import SamplingParams, TokenDelta
from gimbal_jax.serving.frontend.frontend import Frontend
from gimbal_jax.serving.frontend.record import Origin, RequestRecord
from gimbal_jax.serving.text.stops import OutputText
from tests.serving.engine.cache_events import pages_of, removed, stored
from tests.serving.fake_server import CONFIG, LATE, FakeCore, trace, until

THREE = SamplingParams(max_tokens=3)


def with_frontend(**core_options):
    """Runs an async test(core, frontend); the core steps only when the test calls ``step``."""

    def decorate(test):
        @functools.wraps(test)
        def run():
            async def main():
                core = FakeCore(**core_options)
                async with asyncio.timeout(120):
                    await test(core, Frontend(core, time.monotonic))

            asyncio.run(main())

        del run.__wrapped__  # pytest would take the test's parameters for fixtures
        return run

    return decorate


def start(frontend, request_id="a", prompt=(1,), sampling=THREE, engine=None):
    """Return a task that collects all deltas of a request."""

    async def collect():
        with frontend.generate(request_id, prompt, sampling, engine=engine) as stream:
            return [delta async for delta in stream]

    return asyncio.create_task(collect())


@with_frontend()
async def test_a_stream_yields_tokens_as_they_come(core, frontend):
    stream = frontend.generate("a", (5,), THREE)
    [request] = core.submitted
    assert request.label == "a"
    first = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    core.step()
    assert await first == TokenDelta(request.id, (6,))
    assert frontend.active == 1
    core.step()
    assert await anext(stream) == TokenDelta(request.id, (7,))
    core.step()
    assert await anext(stream) == TokenDelta(request.id, (8,), finish_reason="length")
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert frontend.active == 0 and frontend.idle.is_set()
    assert core.cancelled == []
    assert frontend.counters.outcomes == {"length": 1}
    assert (frontend.counters.prompt_tokens, frontend.counters.generated_tokens) == (1, 3)


@with_frontend()
async def test_a_slow_consumer_gets_all_tokens_in_one_delta(core, frontend):
    stream = frontend.generate("a", (5,), dataclasses.replace(THREE, logprobs=1))
    for _ in range(3):
        core.step()
    merged = await anext(stream)
    assert (merged.token_ids, merged.finish_reason, len(merged.logprobs)) == ((6, 7, 8), "length", 3)


@with_frontend()
async def test_dispatch_follows_the_latest_traces(core, frontend):
    core.traces = (trace(0, prefill=5000), trace(1))
    start(frontend, "a")
    await until(lambda: core.submitted)
    assert core.submitted[0].engine == 1
    core.traces = (trace(0), trace(1, prefill=5000, seen=1))
    start(frontend, "b")
    await until(lambda: len(core.submitted) == 2)
    assert (core.submitted[1].engine, core.submitted[1].sequence) == (0, 1)
    assert [record.decision.rule for record in frontend.dispatcher.recent] == ["least_score", "least_score"]
    assert frontend.counters.rules == {"least_score": 2}


@with_frontend(config=LATE)
async def test_late_requests_are_submitted_without_an_engine_and_bound_later(core, frontend):
    start(frontend, "a", engine=1)
    tasks = [start(frontend, id) for id in "bc"]
    await until(lambda: len(core.submitted) == 3)
    assert [(request.engine, request.sequence) for request in core.submitted] == [(1, 1), (None, 0), (None, 0)]
    assert frontend.counters.rules == {"pinned": 1}
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    core.notify(5.0, bound=[(request.id, Decision(0, "late")) for request in core.submitted[1:]])
    await until(lambda: len(frontend.dispatcher.recent) == 2)
    assert frontend.dispatcher.recent[-1] == DispatchRecord("c", 5.0, Decision(0, "late"))
    assert frontend.counters.rules == {"pinned": 1, "late": 2}
    for _ in range(3):
        core.step()
    assert [token for output in await tasks[1] for token in output.token_ids] == [2, 3, 4]


@with_frontend()
async def test_dispatch_prefers_the_engine_that_caches_the_prefix(core, frontend):
    core.traces = tuple(dataclasses.replace(trace(engine), expert_pressure=1.0) for engine in range(2))
    prompt = tuple(range(12))
    core.change_pages(stored(1, *pages_of(prompt)))
    await until(lambda: frontend.prefixes.pages == 3)
    streams = []
    for number in range(2):
        hashes = page_hashes(prompt, 4)
        streams.append(frontend.generate(f"{number}", prompt, THREE, page_hashes=hashes))
        assert (core.submitted[-1].engine, core.submitted[-1].page_hashes) == (1, hashes)
    # The engine never takes the last token from its cache: 8 of the 12 tokens.
    assert frontend.dispatcher.view(0.0).compensation_S == (0, 8)
    assert frontend.dispatcher.recent[-1].decision.terms["uncached"] == (12, 4)
    core.step()
    core.step()  # both come before the first is read, and are read as one
    outputs = [await anext(stream) for stream in streams]
    assert [(output.cached_tokens, len(output.token_ids)) for output in outputs] == [(8, 2), (8, 2)]
    core.change_pages(removed(1, *pages_of(prompt)))
    await until(lambda: frontend.prefixes.pages == 0)


@with_frontend()
async def test_the_end_of_a_request_releases_its_compensation(core, frontend):
    task = start(frontend, prompt=(1,) * 20, engine=0)
    await until(lambda: core.submitted)
    assert frontend.dispatcher.view(time.monotonic()).compensation_S == (20, 0)
    for _ in range(3):
        core.step()
    await task
    assert frontend.dispatcher.view(time.monotonic()).compensation_S == (0, 0)


@with_frontend(max_queue=1)
async def test_a_rejected_request_leaves_nothing_behind(core, frontend):
    start(frontend, "a")
    await until(lambda: core.submitted)
    with pytest.raises(QueueFull):
        await start(frontend, "b", prompt=(1,) * 9)
    assert frontend.active == 1
    assert sum(frontend.dispatcher.view(time.monotonic()).compensation_S) == 1
    assert core.cancelled == []
    assert frontend.counters.outcomes == {"refused": 1}


@with_frontend()
async def test_leaving_a_stream_cancels_it_in_the_core(core, frontend):
    task = start(frontend)
    await until(lambda: core.submitted)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert core.cancelled == [core.submitted[0].id]
    assert frontend.active == 0
    assert frontend.dispatcher.view(time.monotonic()).compensation_S == (0, 0)
    assert frontend.counters.outcomes == {"cancelled": 1}


@with_frontend()
async def test_abort_ends_the_stream_and_the_core(core, frontend):
    task = start(frontend)
    await until(lambda: core.submitted)
    core.step()
    await asyncio.sleep(0)
    frontend.abort(["unknown", "a"])
    outputs = await task
    assert outputs[-1].finish_reason == "abort"
    assert [token for output in outputs for token in output.token_ids] == [2]
    assert core.cancelled == [core.submitted[0].id]


@with_frontend()
async def test_late_tokens_of_an_aborted_request_reach_no_later_one_of_its_id(core, frontend):
    task = start(frontend)
    await until(lambda: core.submitted)
    frontend.abort(["a"])
    await task
    again = start(frontend, prompt=(50,))
    await until(lambda: len(core.submitted) == 2)
    core.notify(outputs=[TokenDelta(core.submitted[0].id, (2,), finish_reason="length")])
    for _ in range(3):
        core.step()
    assert [token for output in await again for token in output.token_ids] == [51, 52, 53]


@with_frontend()
async def test_an_engine_error_fails_the_stream(core, frontend):
    task = start(frontend)
    await until(lambda: core.submitted)
    core.fail(core.submitted[0].id, "out of pages")
    with pytest.raises(GenerationFailed, match="out of pages"):
        await task
    assert frontend.counters.outcomes == {"error": 1}


@with_frontend()
async def test_reject_new_rejects_and_end_all_ends_running_requests(core, frontend):
    task = start(frontend)
    await until(lambda: core.submitted)
    frontend.reject_new("the server is draining")
    with pytest.raises(NotServing, match="draining"):
        await start(frontend, "b")
    frontend.end_all("stopped early")
    with pytest.raises(NotServing, match="stopped early"):
        await task
    assert core.cancelled == [core.submitted[0].id]
    assert frontend.idle.is_set()


class Clock:
    """A clock that tests set."""

    now = 100.0

    def __call__(self):
        return self.now


def with_records(**core_options):
    """Runs an async test(core, frontend, clock, records), where records collects what ``on_ended`` gets."""

    def decorate(test):
        @functools.wraps(test)
        def run():
            async def main():
                core, clock = FakeCore(**core_options), Clock()
                records: list[RequestRecord] = []
                async with asyncio.timeout(120):
                    await test(core, Frontend(core, clock, on_ended=records.append), clock, records)

            asyncio.run(main())

        del run.__wrapped__
        return run

    return decorate


@with_records()
async def test_record_of_a_whole_request(core, frontend, clock, records):
    origin, grammar = Origin("me", "00-trace"), object()
    frontend.generate("a", (5, 6), THREE, engine=1, priority=-3, grammar=grammar, origin=origin)
    assert core.submitted[0].grammar is grammar
    for clock.now in (101.0, 102.0, 104.0):
        core.step()
        await asyncio.sleep(0.01)
    assert len(records) == 1  # the sequence ends in the core, whenever its consumer takes it
    [record] = records
    assert record == RequestRecord(
        request_id="a",
        origin=origin,
        engine=1,
        rule="pinned",
        priority=-3,
        prompt_tokens=2,
        cached_tokens=0,
        output_tokens=3,
        outcome="length",
        error="",
        arrival=100.0,
        queue_s=0.25,
        first_token_s=1.0,
        total_s=4.0,
    )
    assert record.token_s == 1.5


@with_records(max_queue=1, config=LATE)
async def test_records_of_rejected_cancelled_and_failed_requests(core, frontend, clock, records):
    task = start(frontend, "left")
    await until(lambda: core.submitted)
    clock.now = 101.0
    with pytest.raises(QueueFull):
        await start(frontend, "full")
    task.cancel()
    await asyncio.wait([task])
    task = start(frontend, "poisoned")
    await until(lambda: len(core.submitted) == 2)
    core.notify(5.0, bound=[(core.submitted[1].id, Decision(1, "late"))])
    core.fail(core.submitted[1].id, "not finite")
    await asyncio.wait([task])
    frontend.reject_new("draining")
    with pytest.raises(NotServing):
        await start(frontend, "late")
    assert [(r.request_id, r.outcome, r.engine, r.rule, r.queue_s, r.first_token_s, r.total_s) for r in records] == [
        ("full", "refused", None, "", None, None, 0.0),
        ("left", "cancelled", None, "", None, None, 1.0),
        ("poisoned", "error", 1, "late", None, None, 0.0),
        ("late", "refused", None, "", None, None, 0.0),
    ]
    assert ["waiting" in records[0].error, records[2].error, records[3].error] == [True, "not finite", "draining"]
    assert frontend.counters.outcomes == {"refused": 2, "cancelled": 1, "error": 1}
    assert sum(frontend.dispatcher.view(0.0).compensation_S) == 0


@with_records()
async def test_a_text_that_cannot_be_decoded_fails_alone(core, frontend, clock, records):
    def decode(token_ids):
        raise OverflowError("no such token")

    bad = frontend.generate("bad", (1,), THREE, text=OutputText(decode))
    good = start(frontend, "good")
    await asyncio.sleep(0)
    for _ in range(3):
        core.step()
    assert [token for delta in await good for token in delta.token_ids] == [2, 3, 4]
    with pytest.raises(OverflowError, match="no such token"):
        await anext(bad)
    assert [(record.request_id, record.outcome) for record in records] == [("bad", "cancelled"), ("good", "length")]
    assert core.cancelled == [core.submitted[0].id]


def test_news_comes_from_another_thread_until_the_loop_is_closed():
    config = dataclasses.replace(CONFIG, dispatch=DispatchConfig(policy="round_robin"))

    async def main(core):
        async with asyncio.timeout(120):
            frontend = Frontend(core, time.monotonic)
            results = await asyncio.gather(*(start(frontend, str(i), prompt=(i,)) for i in range(10)))
        for i, outputs in enumerate(results):
            assert [token for output in outputs for token in output.token_ids] == [i + 1, i + 2, i + 3]
        assert [request.engine for request in core.submitted] == [0, 1] * 5

    with FakeCore(config=config) as core:
        asyncio.run(main(core))
        core.submitted.clear()
        core.notify(0.0, bound=[("99", Decision(0, "late"))])
        core.notify(outputs=[TokenDelta("99", (1,))])  # the loop is closed: nothing may be raised
