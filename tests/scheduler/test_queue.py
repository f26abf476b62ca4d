from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.config import QueueConfig
from gimbal_jax.scheduler.queue import queue_key

SJF = QueueConfig(aging_s=5.0)
FCFS = QueueConfig(policy="fcfs")


def order(config: QueueConfig, waiting: dict[str, tuple[float, int]], now: float) -> str:
    return "".join(sorted(waiting, key=lambda name: queue_key(config, *waiting[name], now)))


def test_short_first_until_a_long_one_has_aged():
    waiting = {"a": (0.0, 900), "b": (1.0, 800), "c": (2.0, 10), "d": (1.5, 10)}
    assert order(SJF, waiting, now=5.0) == "dcba"  # 5 s of waiting are not over 5 s yet
    assert order(SJF, waiting, now=5.5) == "adcb"
    assert order(SJF, waiting, now=9.0) == "abdc"
    assert order(FCFS, waiting, now=5.0) == "abdc"


requests = st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10_000)), min_size=1)


@given(requests, st.floats(100, 110))
def test_aged_requests_precede_all_others_in_order_of_arrival(requests, now):
    ordered = sorted(requests, key=lambda request: queue_key(SJF, request[0], request[1], now))
    is_aged = [now - arrival > 5.0 for arrival, _ in ordered]
    assert is_aged == sorted(is_aged, reverse=True)
    aged, young = ordered[: sum(is_aged)], ordered[sum(is_aged) :]
    assert [arrival for arrival, _ in aged] == sorted(arrival for arrival, _ in aged)
    assert [(tokens, arrival) for arrival, tokens in young] == sorted((tokens, arrival) for arrival, tokens in young)


@given(requests)
def test_fcfs_is_order_of_arrival(requests):
    ordered = sorted(requests, key=lambda request: queue_key(FCFS, request[0], request[1], 0.0))
    assert [arrival for arrival, _ in ordered] == sorted(arrival for arrival, _ in requests)
