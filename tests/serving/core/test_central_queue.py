"""Late binding in the server: one queue before all engines."""

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gimbal_jax.config import MeshConfig, QueuePolicy
from gimbal_jax.exceptions import QueueFull
from gimbal_jax.serving.engine.prefix import page_hashes
from gimbal_jax.serving.engine.request import Request, SamplingParams
from tests.serving.core.ticked_core import CONFIG, FREE, new_core, open_core, tick, wait_for
from tests.serving.statuses import per_engine

LATE = replace(CONFIG, dispatch=replace(CONFIG.dispatch, policy="late"), queue=replace(CONFIG.queue, policy="fcfs"))


def unbound(name: str, prompt=(1, 2, 3), max_tokens: int = 4, engine: int | None = None, **fields) -> Request:
    return Request(name, tuple(prompt), SamplingParams(max_tokens, temperature=0.0), 0.0, engine, 0, **fields)


def test_late_requests_wait_in_one_queue_until_a_step_has_room():
    with open_core(LATE) as (core, _, outputs):
        for i in range(5):
            core.submit(unbound(f"r{i}", range(10), max_tokens=2))
        core.submit(unbound("pinned", range(10), max_tokens=2, engine=1))
        core.submit(unbound("last", range(10), max_tokens=2))
        # A step of 16 tokens computes a prompt of 10 on each engine and begins another.
        # The pinned one waits for its own.
        lengths = []
        for now in range(5):
            core.tick(float(now))
            lengths.append(core.central_queue)
        assert lengths == [3, 1, 0, 0, 0]
        assert outputs.bound == [(0, "r0", 0), (0, "r1", 1), (0, "r2", 0), (0, "r3", 1), (1, "r4", 0), (2, "last", 0)]
        tick(core, 3)
        assert len(outputs.ends()) == 7
        assert outputs.tokens("last") == outputs.tokens("pinned") == [10, 11]
        assert per_engine(core.status(), "free_pages") == FREE


def test_late_requests_can_be_cancelled_before_they_have_an_engine():
    with open_core(LATE) as (core, _, outputs):
        for name in "abc":
            core.submit(unbound(name, range(16)))
        tick(core, 1)
        assert core.central_queue == 1
        core.cancel("c")
        core.submit(unbound("d"))
        core.cancel("d")
        tick(core, 1)
        assert core.central_queue == 0
        tick(core, 10)
        assert outputs.ends() == dict.fromkeys("ab", ("length", ""))


def test_max_queue_of_all_engines_bounds_the_central_queue():
    with open_core(replace(LATE, engine=replace(LATE.engine, max_queue=2))) as (core, _, _):
        for i in range(4):
            core.submit(unbound(f"r{i}", range(16), engine=0 if i % 2 else None))
        with pytest.raises(QueueFull, match=r"4 requests wait \(2 per engine: max_queue\)"):
            core.submit(unbound("refused"))
        tick(core, 1)
        core.submit(unbound("accepted"))


def test_single_requests_alternate_between_engines():
    with open_core(LATE) as (core, _, outputs):
        for i in range(4):
            core.submit(unbound(f"r{i}", max_tokens=1))
            tick(core, 2)
            assert len(outputs.ends()) == i + 1
        assert [engine for _, _, engine in outputs.bound] == [0, 1, 0, 1]


def test_the_engine_thread_ticks_while_requests_have_no_engine():
    """Every step leaves all engines idle and the queue full; a thread that slept then would wake after an hour."""
    config = replace(LATE, dispatch=replace(LATE.dispatch, trace_period_s=3600.0))
    with new_core(config) as (core, _, outputs):
        core.open()
        for i in range(10):
            core.submit(unbound(f"r{i}", range(16), max_tokens=1))
        core.start()
        wait_for(lambda: len(outputs.ends()) == 10)


def test_late_follows_the_queue_policy():
    config = replace(LATE, mesh=MeshConfig(), queue=replace(LATE.queue, policy="priority"))
    with open_core(config) as (core, _, outputs):
        for name, length, priority in [("a", 9, 1), ("b", 16, -1), ("c", 10, 0), ("d", 2, 0)]:
            core.submit(unbound(name, range(length), max_tokens=1, priority=priority))
        tick(core, 4)
        # c and d fit into one step, a does not fit beside them
        assert [output.request_id for output in outputs.all] == ["b", "d", "c", "a"]


def test_aging_in_the_central_queue_moves_a_request_to_the_front():
    config = replace(LATE, mesh=MeshConfig(), queue=replace(LATE.queue, policy="sjf_aging"))
    with open_core(config) as (core, _, outputs):
        for name, length in [("long", 16), ("short", 9)]:
            core.submit(unbound(name, range(length), max_tokens=1))
        core.tick(0.0)
        core.submit(replace(unbound("young", range(9), max_tokens=1), arrival=5.0))
        core.tick(config.queue.aging_s + 0.5)
        core.tick(config.queue.aging_s + 0.6)
        assert [output.request_id for output in outputs.all] == ["short", "long", "young"]


def test_a_failure_also_ends_requests_without_an_engine():
    with new_core(LATE) as (core, _, outputs):
        core.open()
        for i in range(6):
            core.submit(unbound(f"r{i}", range(16), max_tokens=9))
        tick(core, 1)
        assert core.central_queue == 4
        core._end("failed", "device lost")
        assert outputs.ends() == dict.fromkeys((f"r{i}" for i in range(6)), ("error", "device lost"))
        assert core.central_queue == 0


lengths = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12), st.none() | st.integers(0, 1)), max_size=20)


@settings(deadline=None)
@given(lengths, st.sampled_from(get_args(QueuePolicy)), st.integers(6, 16), st.sampled_from([2, 4]))
def test_late_gives_a_step_only_requests_that_fit_and_serves_all(requests, policy, pages, rows):
    """Whoever is bound starts in the same step, so only the preempted wait at an engine. Nobody waits for ever."""
    engine = replace(LATE.engine, num_pages=max(pages, 13), max_rows=rows)
    with open_core(replace(LATE, engine=engine, queue=replace(LATE.queue, policy=policy))) as (core, _, outputs):
        for i, (prompt, tokens, pinned) in enumerate(requests):
            core.submit(unbound(f"r{i}", range(prompt), max_tokens=tokens, engine=pinned))
        for now in range(400):
            preempted = sum(engine.preemptions for engine in core.engines)
            waited = sum(engine.waiting for engine in core.engines)
            core.tick(float(now))
            preempted = sum(engine.preemptions for engine in core.engines) - preempted
            assert sum(engine.waiting for engine in core.engines) <= waited + preempted
            if len(outputs.ends()) == len(requests):
                break
        assert outputs.ends() == {f"r{i}": ("length", "") for i in range(len(requests))}
        for i, (prompt, tokens, _) in enumerate(requests):
            assert outputs.tokens(f"r{i}") == list(range(prompt, prompt + tokens))


def shared(name: str, prompt, max_tokens: int = 4, **fields) -> Request:
    return unbound(name, prompt, max_tokens, page_hashes=page_hashes(prompt, LATE.engine.page_size), **fields)


@pytest.mark.parametrize("ahead", [0, 1])
def test_late_requests_go_to_the_engine_with_their_prefix(ahead):
    with open_core(LATE, ahead) as (core, _, outputs):
        core.submit(shared("first", range(9), 1))
        tick(core, 2)
        core.submit(shared("again", range(10), 1))  # although it is the other one's turn
        core.submit(shared("other", range(20, 29), 1))
        tick(core, 3)
        assert {name: engine for _, name, engine in outputs.bound} == {"first": 0, "again": 0, "other": 1}
        assert per_engine(core.status(), "tokens_computed") == (9 + 2, 9)
        assert outputs.ends() == dict.fromkeys(("first", "again", "other"), ("length", ""))


def test_the_central_queue_does_not_count_cached_tokens():
    config = replace(LATE, mesh=MeshConfig(), queue=replace(LATE.queue, policy="sjf_aging"))
    with open_core(config) as (core, _, outputs):
        core.submit(shared("first", range(17), 1))
        tick(core, 2)
        outputs.all.clear()
        core.submit(shared("short", range(40, 49), 1))
        core.submit(shared("known", range(20), 1))  # 4 of 20 tokens
        tick(core, 1)
        assert [output.request_id for output in outputs.all] == ["known", "short"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), max_size=20), st.integers(13, 20))
def test_a_bound_request_that_shares_pages_starts_immediately(requests, pages):
    """Pages that the cache keeps are free ones until they are taken: bound requests must not count them twice."""
    engine = replace(LATE.engine, num_pages=pages, max_rows=3)
    with open_core(replace(LATE, engine=engine)) as (core, _, outputs):
        for i, (prompt, tokens) in enumerate(requests):
            core.submit(shared(f"r{i}", range(prompt), tokens))
        for now in range(400):
            preempted = sum(engine.preemptions for engine in core.engines)
            waited = sum(engine.waiting for engine in core.engines)
            core.tick(float(now))
            preempted = sum(engine.preemptions for engine in core.engines) - preempted
            assert sum(engine.waiting for engine in core.engines) <= waited + preempted
            if len(outputs.ends()) == len(requests):
                break
        for i, (prompt, tokens) in enumerate(requests):
            assert outputs.tokens(f"r{i}") == list(range(prompt, prompt + tokens))
