import math

from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.config import QueueConfig
from gimbal_jax.scheduler.queue import Job, key_until, queue_key

SJF = QueueConfig(aging_s=5.0)
FCFS = QueueConfig(policy="fcfs")
HRRN = QueueConfig(policy="hrrn")
PRIORITY = QueueConfig(policy="priority", aging_s=5.0)


def order(config: QueueConfig, waiting: dict[str, Job], now: float) -> str:
    return "".join(sorted(waiting, key=lambda name: queue_key(config, waiting[name], now)))


def test_short_first_until_a_long_one_has_aged():
    waiting = {"a": Job(0.0, 900), "b": Job(1.0, 800), "c": Job(2.0, 10), "d": Job(1.5, 10)}
    assert order(SJF, waiting, now=5.0) == "dcba"  # 5 s of waiting are not over 5 s yet
    assert order(SJF, waiting, now=5.5) == "adcb"
    assert order(SJF, waiting, now=9.0) == "abdc"
    assert order(FCFS, waiting, now=5.0) == "abdc"


def test_hrrn_by_hand():
    # Since a came the engine has processed 600 tokens, since b 500, since c and d none.
    # a has waited 600 / 900 of its own length, b 500 / 500: b goes first, c and d in order of arrival last.
    waiting = {
        "a": Job(0.0, 900, waited_tokens=600),
        "b": Job(1.0, 500, waited_tokens=500),
        "d": Job(3.0, 1, waited_tokens=0),
        "c": Job(2.0, 10, waited_tokens=0),
    }
    assert order(HRRN, waiting, now=3.0) == "bacd"
    # Once 20 more are processed the shortest have the highest ratios: 20 / 1, 20 / 10, then 520 / 500 and 620 / 900.
    later = {name: Job(job.arrival, job.prefill_tokens, job.waited_tokens + 20) for name, job in waiting.items()}
    assert order(HRRN, later, now=3.1) == "dcba"


def test_priority_by_hand():
    waiting = {
        "a": Job(0.0, 900, priority=1),
        "b": Job(4.0, 10, priority=1),
        "c": Job(4.0, 800, priority=-2),
        "d": Job(3.0, 900, priority=-2),
        "e": Job(4.0, 5),
    }
    assert order(PRIORITY, waiting, now=4.0) == "cdeba"
    assert order(PRIORITY, waiting, now=5.5) == "cdeab"  # a has aged, but within its priority only
    assert order(PRIORITY, waiting, now=8.5) == "dceab"


jobs = st.lists(st.builds(Job, st.floats(0, 100), st.integers(0, 10_000)), min_size=1)


@given(jobs, st.floats(100, 110))
def test_aged_requests_precede_all_others_in_order_of_arrival(jobs, now):
    ordered = sorted(jobs, key=lambda job: queue_key(SJF, job, now))
    is_aged = [now - job.arrival > 5.0 for job in ordered]
    assert is_aged == sorted(is_aged, reverse=True)
    aged, young = ordered[: sum(is_aged)], ordered[sum(is_aged) :]
    assert [job.arrival for job in aged] == sorted(job.arrival for job in aged)
    assert [(job.prefill_tokens, job.arrival) for job in young] == sorted(
        (job.prefill_tokens, job.arrival) for job in young
    )


@given(jobs)
def test_fcfs_is_order_of_arrival(jobs):
    ordered = sorted(jobs, key=lambda job: queue_key(FCFS, job, 0.0))
    assert [job.arrival for job in ordered] == sorted(job.arrival for job in jobs)


@given(st.lists(st.builds(Job, st.just(0.0), st.integers(1, 1000), st.integers(0, 1000), st.integers(-5, 5))))
def test_priority_is_never_overruled_and_equal_priorities_are_sjf_aging(jobs):
    ordered = sorted(jobs, key=lambda job: queue_key(PRIORITY, job, 1.0))
    assert [job.priority for job in ordered] == sorted(job.priority for job in jobs)
    for priority in {job.priority for job in jobs}:
        mine = [job for job in jobs if job.priority == priority]
        within = [job for job in ordered if job.priority == priority]
        assert within == sorted(mine, key=lambda job: queue_key(SJF, job, 1.0))


def test_keys_hold_until_a_request_ages():
    job = Job(arrival=1.0, prefill_tokens=10)
    assert [key_until(SJF, job, now) for now in (1.0, 6.0, 6.5)] == [6.0, 6.0, math.inf]
    assert key_until(FCFS, job, 1.0) == math.inf
    assert key_until(HRRN, job, 1.0) == -math.inf  # whatever the engine computes changes it


@given(
    st.sampled_from([SJF, FCFS, HRRN, PRIORITY]),
    st.builds(Job, st.floats(0, 100), st.integers(1, 1000), st.integers(0, 1000), st.integers(-5, 5)),
    st.floats(0, 20),
    st.floats(0, 20),
)
def test_keys_hold_as_long_as_they_say(config, job, waited, more):
    now, later = job.arrival + waited, job.arrival + waited + more
    if later < key_until(config, job, now):
        assert queue_key(config, job, later) == queue_key(config, job, now)
