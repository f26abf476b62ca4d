"""Which requests an engine takes into a step, in which order."""

import dataclasses

import pytest

from gimbal_jax.config import QueueConfig
from gimbal_jax.serving.engine.engine import Engine
from tests.serving.engine.paged_model import PagedModel, request
from tests.serving.engine.stepped_engine import CONFIG, FCFS, HRRN, PRIORITY, SJF, run, schedule, step


def three_prompts(queue: QueueConfig, now: float) -> list[tuple[str, int]]:
    engine = Engine(0, CONFIG, queue)
    for i, length in enumerate((20, 3, 9), 1):
        engine.add(request("abc"[i - 1], length, arrival=float(i), sequence=i))
    return schedule(engine, now).prefill


def test_fcfs_order():
    assert three_prompts(FCFS, now=3.0) == [("a", 16)]


def test_shortest_prefill_first():
    # b 3 tokens in one tile, c 9 in three: no tile is left for a, although the budget has 4 tokens.
    assert three_prompts(SJF, now=3.0) == [("b", 3), ("c", 9)]


def test_an_aged_request_runs_first():
    assert three_prompts(SJF, now=6.5) == [("a", 16)]


def test_aging_moves_a_waiting_request_to_the_front():
    config = dataclasses.replace(CONFIG, num_pages=6, max_model_len=24)
    engine, model = Engine(0, config, SJF), PagedModel(config)
    engine.add(request("running", 12, max_tokens=8))  # 4 of 6 pages
    step(engine, model)
    engine.add(request("long", 14, arrival=1.0, sequence=2))
    engine.add(request("short", 9, arrival=2.0, sequence=3))  # 3 pages
    assert step(engine, model, now=3.0)[0].prefill == []  # both were put in order, and had no room
    engine.cancel("running")
    assert schedule(engine, 6.5).prefill == [("long", 14)]


def test_the_oldest_sequence_decodes_first():
    config = dataclasses.replace(CONFIG, num_pages=5, max_model_len=16)
    engine, model = Engine(0, config, SJF), PagedModel(config)
    engine.add(request("old", 10, max_tokens=6, arrival=0.0))  # 3 of 5 pages, and a fourth one for its 13th token
    engine.add(request("young", 3, max_tokens=9, arrival=1.0, sequence=2))  # 1 page, a second one for its 5th token
    assert step(engine, model, now=1.0)[0].prefill == [("young", 3), ("old", 10)]
    plans = [step(engine, model, now=1.0)[0] for _ in range(4)]
    assert [plan.decode for plan in plans] == [[("old", 1), ("young", 1)]] * 2 + [[("old", 1)]] * 2
    assert engine.preemptions == 1


def test_a_preempted_sequence_is_queued_by_all_tokens_to_recompute():
    config = dataclasses.replace(CONFIG, num_pages=4, max_model_len=16)
    engine, model = Engine(0, config, SJF), PagedModel(config)
    engine.add(request("old", 6, max_tokens=4, arrival=0.0))
    engine.add(request("young", 6, max_tokens=9, arrival=1.0, sequence=2))
    for _ in range(3):
        step(engine, model, now=1.0)
    assert engine.preemptions == 0
    engine.add(request("between", 8, arrival=2.0, sequence=3))  # more than "young" had at first, less than it has now
    step(engine, model, now=2.0)
    assert engine.preemptions == 1
    assert schedule(engine, 2.0).prefill[0] == ("between", 8)


def test_priority_goes_before_length():
    engine = Engine(0, CONFIG, PRIORITY)
    for name, length, priority in [("a", 3, 1), ("b", 9, -1), ("c", 2, 0)]:
        engine.add(dataclasses.replace(request(name, length), priority=priority))
    assert schedule(engine, 0.0).prefill == [("b", 9), ("c", 2)]


def test_the_lowest_priority_is_preempted_first():
    config = dataclasses.replace(CONFIG, num_pages=4, max_model_len=16)
    engine = Engine(0, config, PRIORITY)
    for name, arrival, priority in [("old", 0.0, 5), ("young", 1.0, 0)]:
        engine.add(dataclasses.replace(request(name, 6, 8, arrival=arrival), priority=priority))
    plans = [plan for plan, _ in run(engine, config)]
    assert [plan.all for plan in plans[2:4]] == [[("young", 1), ("old", 1)], [("young", 1)]]


@pytest.mark.parametrize(("queue", "served"), [(HRRN, True), (dataclasses.replace(SJF, aging_s=1e9), False)])
def test_hrrn_serves_a_long_prompt_under_a_stream_of_short_ones(queue, served):
    engine, model = Engine(0, CONFIG, queue), PagedModel(CONFIG)
    engine.add(request("long", 40, max_tokens=1))
    served_long = False
    for now in range(1, 40):
        for i in range(2):  # of two tiles each: they fill the step's four
            engine.add(request(f"{now}.{i}", 7, max_tokens=1, arrival=float(now)))
        served_long |= any(out.request_id == "long" for out in step(engine, model, float(now))[1])
    assert served_long == served


def test_hrrn_counts_waiting_in_another_queue():
    engine = Engine(0, CONFIG, HRRN)
    engine.add(request("here", 12), waited_tokens=6)
    engine.add(request("elsewhere", 16, arrival=1.0), waited_tokens=9)
    assert schedule(engine, 1.0).prefill == [("elsewhere", 16)]


def test_a_shorter_request_overtakes_a_started_prefill():
    engine, model = Engine(0, CONFIG, SJF), PagedModel(CONFIG)
    engine.add(request("long", 40, sequence=1))
    assert step(engine, model)[0].prefill == [("long", 16)]
    engine.add(request("short", 5, arrival=1.0, sequence=2))
    plan, outputs = step(engine, model, now=1.0)
    assert plan.prefill == [("short", 5), ("long", 8)]
    assert plan.plan.tiles == 4
    assert [out.request_id for out in outputs] == ["short"]
    # Now "short" decodes: it takes one token of the budget, and the rest goes to prefill.
    plan, _ = step(engine, model, now=1.0)
    assert (plan.decode, plan.prefill) == ([("short", 1)], [("long", 15)])
    assert (plan.plan.decode.start_D.tolist(), plan.plan.prefill[0].start) == ([5], 24)


def test_a_started_prefill_is_queued_by_its_remaining_tokens():
    engine, model = Engine(0, CONFIG, SJF), PagedModel(CONFIG)
    engine.add(request("started", 40, sequence=1))
    step(engine, model)
    engine.add(request("longer", 30, arrival=1.0, sequence=2))
    assert schedule(engine, 1.0).prefill == [("started", 16)]  # 24 left


def test_no_request_overtakes_the_first_that_lacks_pages():
    config = dataclasses.replace(CONFIG, num_pages=8, token_budget=64)
    engine, model = Engine(0, config, FCFS), PagedModel(config)
    engine.add(request("running", 13, max_tokens=8, sequence=1))  # 4 of 8 pages
    step(engine, model)
    engine.add(request("big", 16, sequence=2))  # 17 tokens: 5 pages
    engine.add(request("small", 2, sequence=3))
    plan, _ = step(engine, model)
    assert (plan.decode, plan.prefill) == ([("running", 1)], [])
    engine.cancel("running")
    assert step(engine, model)[0].prefill == [("big", 16), ("small", 2)]


def test_decode_and_all_chunks_share_the_token_budget():
    config = dataclasses.replace(CONFIG, token_budget=8, tile=1)
    engine, model = Engine(0, config, FCFS), PagedModel(config)
    engine.add(request("a", 1, sequence=1))
    step(engine, model)
    engine.add(request("b", 4, sequence=2))
    engine.add(request("c", 9, sequence=3))
    plan = schedule(engine)
    assert (plan.decode, plan.prefill, plan.plan.tiles) == ([("a", 1)], [("b", 4), ("c", 3)], 7)


def test_rows_limit_admission():
    config = dataclasses.replace(CONFIG, max_rows=2)
    engine = Engine(0, config, FCFS)
    for i in range(3):
        engine.add(request(i, 1, sequence=i + 1))
    assert schedule(engine, 0.0).prefill == [("0", 1), ("1", 1)]


@pytest.mark.parametrize("queue", [FCFS, SJF, HRRN, PRIORITY], ids=lambda queue: queue.policy)
def test_the_queue_head_starts_next(queue):
    config = dataclasses.replace(CONFIG, max_rows=1, token_budget=4)
    engine, model = Engine(0, config, queue), PagedModel(config)
    assert engine.queue_head(0.0) is None
    for i, (length, priority) in enumerate([(20, 0), (3, 2), (9, 1), (3, 1), (30, -1)]):
        asked = request(f"r{i}", length, 2, arrival=i / 10, sequence=i + 1)
        engine.add(dataclasses.replace(asked, priority=priority if queue is PRIORITY else 0))
    started, now = [], 1.0
    while not engine.idle:
        head = engine.queue_head(now) if not engine.running else None
        plan, _ = step(engine, model, now)
        if head is not None:
            assert (head.request_id, head.waited_s) == (plan.prefill[0][0], now - int(head.request_id[1:]) / 10)
            assert head.prefill_tokens == (20, 3, 9, 3, 30)[int(head.request_id[1:])]
            started.append(head.request_id)
        now += 0.7
    assert sorted(started) == ["r0", "r1", "r2", "r3", "r4"]
