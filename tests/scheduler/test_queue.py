import math

from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.config import QueueConfig
from gimbal_jax.scheduler.queue import QueueItem, key_until, queue_key

SJF = QueueConfig(aging_s=5.0)
FCFS = QueueConfig(policy="fcfs")
HRRN = QueueConfig(policy="hrrn")
PRIORITY = QueueConfig(policy="priority", aging_s=5.0)


def order(config: QueueConfig, waiting: dict[str, QueueItem], now: float) -> str:
    return "".join(sorted(waiting, key=lambda name: queue_key(config, waiting[name], now)))


def test_sjf_aging_runs_short_requests_first_until_a_long_one_ages():
    waiting = {"a": QueueItem(0.0, 900), "b": QueueItem(1.0, 800), "c": QueueItem(2.0, 10), "d": QueueItem(1.5, 10)}
    assert order(SJF, waiting, now=5.0) == "dcba"  # 5 s of waiting are not over 5 s yet
    assert order(SJF, waiting, now=5.5) == "adcb"
    assert order(SJF, waiting, now=9.0) == "abdc"
    assert order(FCFS, waiting, now=5.0) == "abdc"


def test_hrrn_orders_by_response_ratio():
    # Since a came the engine has processed 600 tokens, since b 500, since c and d none.
    # a has waited 600 / 900 of its own length, b 500 / 500: b goes first, c and d in order of arrival last.
    waiting = {
        "a": QueueItem(0.0, 900, waited_tokens=600),
        "b": QueueItem(1.0, 500, waited_tokens=500),
        "d": QueueItem(3.0, 1, waited_tokens=0),
        "c": QueueItem(2.0, 10, waited_tokens=0),
    }
    assert order(HRRN, waiting, now=3.0) == "bacd"
    # Once 20 more are processed the shortest have the highest ratios: 20 / 1, 20 / 10, then 520 / 500 and 620 / 900.
    later = {
        name: QueueItem(item.arrival, item.prefill_tokens, item.waited_tokens + 20) for name, item in waiting.items()
    }
    assert order(HRRN, later, now=3.1) == "dcba"


def test_priority_orders_by_priority_then_sjf_aging():
    waiting = {
        "a": QueueItem(0.0, 900, priority=1),
        "b": QueueItem(4.0, 10, priority=1),
        "c": QueueItem(4.0, 800, priority=-2),
        "d": QueueItem(3.0, 900, priority=-2),
        "e": QueueItem(4.0, 5),
    }
    assert order(PRIORITY, waiting, now=4.0) == "cdeba"
    assert order(PRIORITY, waiting, now=5.5) == "cdeab"  # a has aged, but within its priority only
    assert order(PRIORITY, waiting, now=8.5) == "dceab"


items = st.lists(st.builds(QueueItem, st.floats(0, 100), st.integers(0, 10_000)), min_size=1)


@given(items, st.floats(100, 110))
def test_aged_requests_precede_all_others_in_order_of_arrival(items, now):
    ordered = sorted(items, key=lambda item: queue_key(SJF, item, now))
    is_aged = [now - item.arrival > 5.0 for item in ordered]
    assert is_aged == sorted(is_aged, reverse=True)
    aged, young = ordered[: sum(is_aged)], ordered[sum(is_aged) :]
    assert [item.arrival for item in aged] == sorted(item.arrival for item in aged)
    assert [(item.prefill_tokens, item.arrival) for item in young] == sorted(
        (item.prefill_tokens, item.arrival) for item in young
    )


@given(items)
def test_fcfs_is_order_of_arrival(items):
    ordered = sorted(items, key=lambda item: queue_key(FCFS, item, 0.0))
    assert [item.arrival for item in ordered] == sorted(item.arrival for item in items)


@given(st.lists(st.builds(QueueItem, st.just(0.0), st.integers(1, 1000), st.integers(0, 1000), st.integers(-5, 5))))
def test_priority_always_decides_and_equal_priorities_are_sjf_aging(items):
    ordered = sorted(items, key=lambda item: queue_key(PRIORITY, item, 1.0))
    assert [item.priority for item in ordered] == sorted(item.priority for item in items)
    for priority in {item.priority for item in items}:
        mine = [item for item in items if item.priority == priority]
        within = [item for item in ordered if item.priority == priority]
        assert within == sorted(mine, key=lambda item: queue_key(SJF, item, 1.0))


def test_key_until_is_the_time_of_aging():
    item = QueueItem(arrival=1.0, prefill_tokens=10)
    assert [key_until(SJF, item, now) for now in (1.0, 6.0, 6.5)] == [6.0, 6.0, math.inf]
    assert key_until(FCFS, item, 1.0) == math.inf
    assert key_until(HRRN, item, 1.0) == -math.inf  # whatever the engine computes changes it


@given(
    st.sampled_from([SJF, FCFS, HRRN, PRIORITY]),
    st.builds(QueueItem, st.floats(0, 100), st.integers(1, 1000), st.integers(0, 1000), st.integers(-5, 5)),
    st.floats(0, 20),
    st.floats(0, 20),
)
def test_keys_do_not_change_before_key_until(config, item, waited, more):
    now, later = item.arrival + waited, item.arrival + waited + more
    if later < key_until(config, item, now):
        assert queue_key(config, item, later) == queue_key(config, item, now)
