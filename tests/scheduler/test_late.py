"""Late binding: worked by hand, and what must hold for any queue and any engines."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.config import EngineConfig, QueueConfig
from gimbal_jax.scheduler.dispatch_decision import Decision
from gimbal_jax.scheduler.late import Capacity, PendingRequest, bind
from gimbal_jax.scheduler.queue import QueueItem, queue_key

ENGINE = EngineConfig(page_size=4, token_budget=16, tile=4, max_rows=8)
FCFS, SJF = QueueConfig(policy="fcfs"), QueueConfig(aging_s=5.0)
IDLE = Capacity(decode_rows=0, free_rows=8, free_pages=100, prefills=())


def pending(name: str, tokens: int, arrival: float = 0.0, cached_S=(0, 0), engine: int | None = None) -> PendingRequest:
    return PendingRequest(name, QueueItem(arrival, tokens), tuple(cached_S), engine)


def bound(waiting, capacity_S, queue=FCFS, turn=0, now=0.0) -> list[tuple[int | str, int | None]]:
    return [(request.id, decision.engine) for request, decision in bind(waiting, capacity_S, ENGINE, queue, turn, now)]


def test_request_goes_to_the_engine_with_the_least_work():
    capacity_S = [Capacity(3, 5, 100, (QueueItem(0.0, 5),)), Capacity(6, 2, 100, ())]
    # engine 0 has 3 + 5 tokens to do, engine 1 has 6
    ((request, decision),) = bind([pending("a", 4, 1.0)], capacity_S, ENGINE, FCFS, 0, 1.0)
    terms = {"decode": (3, 6), "prefill": (5, 0), "uncached": (4, 4), "no_room": (0, 0)}
    assert (request.id, decision) == ("a", Decision(1, "late", terms))
    assert decision.scores_S == (12, 10)
    # b finds 8 and 10, c 12 and 10, d 12 and 14; e would find 16 and 14 of 16.
    waiting = [pending(name, 4, 1.0) for name in "abcde"]
    assert bound(waiting, capacity_S) == [("a", 1), ("b", 0), ("c", 1), ("d", 0)]


def test_equal_engines_take_turns():
    assert [bound([pending("a", 4)], [IDLE] * 2, turn=turn) for turn in (0, 1)] == [[("a", 0)], [("a", 1)]]
    waiting = [pending(name, 4) for name in "abcde"]
    assert [engine for _, engine in bound(waiting, [IDLE] * 2, turn=1)] == [1, 0, 1, 0, 1]


def test_cached_prefix_counts_as_the_work_that_it_saves():
    cached = pending("a", 12, cached_S=(0, 8))
    for busy, engine in [(7, 1), (9, 0)]:
        assert bound([cached], [IDLE, replace(IDLE, decode_rows=busy)]) == [("a", engine)]
    # What is cached needs neither pages nor room in the step: 13 tokens are 4 pages, 2 of them there.
    assert bound([cached], [replace(IDLE, free_pages=3), replace(IDLE, free_pages=2, decode_rows=9)]) == [("a", 1)]
    assert bound([cached], [replace(IDLE, free_pages=3), replace(IDLE, free_pages=1)]) == []
    # Pages that nobody uses are among the free ones until it takes them.
    kept, capacity_S = cached._replace(kept_pages_S=(0, 2)), [replace(IDLE, free_pages=3)]
    assert bound([kept], [*capacity_S, replace(IDLE, free_pages=3)]) == []
    assert bound([kept], [*capacity_S, replace(IDLE, free_pages=4)]) == [("a", 1)]


def test_rows_pages_and_step_tokens_limit_an_engine():
    full = replace(IDLE, free_rows=0)
    assert bound([pending("a", 4)], [full, full]) == []
    assert bound([pending("a", 4)], [full, replace(IDLE, decode_rows=15)]) == [("a", 1)]
    one_row = [replace(IDLE, free_rows=1)] * 2
    assert bound([pending(name, 1) for name in "abc"], one_row) == [("a", 0), ("b", 1)]
    # 8 tokens, and the one after them, are 3 pages
    assert bound([pending("a", 8)], [replace(IDLE, free_pages=2), replace(IDLE, free_pages=3)]) == [("a", 1)]
    five_pages = [replace(IDLE, free_pages=5)] * 2
    assert bound([pending(name, 8) for name in "abc"], five_pages) == [("a", 0), ("b", 1)]
    # 13 tokens are all 4 tiles of 4: no room for another, although 3 tokens are left
    assert bound([pending("a", 13), pending("b", 1)], [IDLE, full]) == [("a", 0)]
    assert bound([pending("a", 12), pending("b", 1)], [IDLE, full]) == [("a", 0), ("b", 0)]


def test_long_prompt_starts_where_its_first_tokens_fit():
    long = pending("long", 40, arrival=1.0)
    full, started = (replace(IDLE, prefills=(QueueItem(0.0, tokens),)) for tokens in (16, 3))
    assert bound([long], [full, full]) == []
    assert bound([long], [full, started]) == [("long", 1)]
    assert bound([long, pending("next", 1, arrival=2.0)], [full, started]) == [("long", 1)]


def test_started_prefills_count_if_the_queue_runs_them_first():
    started = replace(IDLE, prefills=(QueueItem(0.0, 30),))
    short = pending("short", 8, arrival=1.0)
    assert bound([short], [started] * 2, FCFS, now=1.0) == []
    assert bound([short], [started] * 2, SJF, now=1.0) == [("short", 0)]
    assert bound([short], [started] * 2, SJF, now=5.5) == []  # the started one has aged


def test_later_requests_wait_behind_one_without_room():
    few_pages = replace(IDLE, free_pages=2)
    waiting = [pending("big", 10, 1.0), pending("small", 1, 2.0)]
    assert bound(waiting, [few_pages] * 2) == []
    assert bound(waiting[1:], [few_pages] * 2) == [("small", 0)]


def test_pinned_request_waits_for_its_engine_and_blocks_no_other():
    few_pages = replace(IDLE, free_pages=2)
    pinned = pending("pinned", 10, engine=0)
    waiting = [pinned, *(pending(name, 1, 1.0) for name in "ab")]
    assert bound(waiting, [IDLE, IDLE], turn=1) == [("pinned", 0), ("a", 1), ("b", 1)]
    assert bound(waiting, [few_pages, IDLE]) == [("a", 1), ("b", 1)]
    assert bound(waiting, [replace(IDLE, free_rows=0), IDLE]) == [("a", 1), ("b", 1)]
    ((_, decision),) = bind([pinned], [IDLE, IDLE], ENGINE, FCFS, 1, 0.0)
    assert (decision.rule, decision.scores_S) == ("pinned", (10, math.inf))


@st.composite
def queues_and_engines(draw):
    sources = draw(st.integers(1, 4))
    tile = draw(st.sampled_from([1, 4, 8]))
    engine = EngineConfig(page_size=4, token_budget=draw(st.integers(8, 40)), tile=tile)
    queue = QueueConfig(policy=draw(st.sampled_from(["sjf_aging", "fcfs", "hrrn", "priority"])))
    items = st.builds(QueueItem, st.floats(0, 10), st.integers(1, 60), st.integers(0, 99), st.integers(-1, 1))
    capacity_S = [
        Capacity(
            decode_rows=draw(st.integers(0, 8)),
            free_rows=draw(st.integers(0, 4)),
            free_pages=draw(st.integers(0, 40)),
            prefills=tuple(draw(st.lists(items, max_size=2))),
        )
        for _ in range(sources)
    ]
    waiting = [
        PendingRequest(
            str(i),
            draw(items),
            tuple(draw(st.lists(st.sampled_from([0, 4, 16]), min_size=sources, max_size=sources))),
            draw(st.none() | st.integers(0, sources - 1)),
        )
        for i in range(draw(st.integers(0, 12)))
    ]
    return waiting, capacity_S, engine, queue, draw(st.integers(0, sources - 1))


@given(queues_and_engines(), st.floats(10, 20))
def test_no_step_exceeds_its_capacity(case, now):
    waiting, capacity_S, engine, queue, turn = case
    answer = bind(waiting, capacity_S, engine, queue, turn, now)
    assert len({request.id for request, _ in answer}) == len(answer)
    for s, room in enumerate(capacity_S):
        mine = [request for request, decision in answer if decision.engine == s]
        assert all(request.engine in (None, s) for request in mine)
        assert len(mine) <= room.free_rows
        prompts = [request.item.prefill_tokens for request in mine]
        cached = [request.cached_tokens_S[s] for request in mine]
        pages = sum(math.ceil((prompt + 1) / 4) - held // 4 for prompt, held in zip(prompts, cached, strict=True))
        assert pages <= max(room.free_pages, 0) or not mine
        # The step computes its prefills in the order of the queue, and of each new one at least the beginning.
        started = [(queue_key(queue, item, now), item.prefill_tokens) for item in room.prefills]
        new = [
            (queue_key(queue, request.item, now), max(1, prompt - held))
            for request, prompt, held in zip(mine, prompts, cached, strict=True)
        ]
        for i, (key, _) in enumerate(new):
            before = [n for k, n in started if k <= key] + [n for _, n in new[:i]]
            assert room.decode_rows + sum(before) + 1 <= engine.token_budget
            tiles = sum(math.ceil(n / engine.tile) for n in [*before, 1])
            assert tiles <= engine.token_budget // engine.tile


@given(queues_and_engines(), st.floats(10, 20))
def test_no_request_overtakes_on_an_engine_that_an_earlier_one_could_use(case, now):
    """Without what stands behind it, a request that is left is left all the same, and who was bound stays bound."""
    waiting, capacity_S, engine, queue, turn = case
    answer = bind(waiting, capacity_S, engine, queue, turn, now)
    ids = {request.id for request, _ in answer}
    ordered = sorted(waiting, key=lambda request: queue_key(queue, request.item, now))
    for i, request in enumerate(ordered):
        if request.id in ids:
            continue
        upto = bind(ordered[: i + 1], capacity_S, engine, queue, turn, now)
        assert request.id not in {other.id for other, _ in upto}
        overtaking = [decision.engine for other, decision in answer if other in ordered[i + 1 :]]
        assert request.engine not in overtaking if request.engine is not None else overtaking == []


@given(st.integers(1, 5), st.integers(0, 40), st.integers(1, 4))
def test_equal_engines_share_equal_requests_within_one(sources, requests, tokens):
    waiting = [PendingRequest(str(i), QueueItem(0.0, tokens), (0,) * sources) for i in range(requests)]
    for turn in range(sources):
        answer = bind(waiting, [IDLE] * sources, ENGINE, FCFS, turn, 0.0)
        engines = [decision.engine for _, decision in answer]
        picks_S = [engines.count(s) for s in range(sources)]
        assert max(picks_S) - min(picks_S) <= 1
        assert len(answer) == min(requests, sources * (16 // 4))


@pytest.mark.parametrize("queue", [FCFS, SJF])
def test_an_empty_queue_binds_nothing(queue):
    assert bind([], [IDLE], ENGINE, queue, 0, 0.0) == []
