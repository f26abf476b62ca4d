import numpy as np

from gimbal_jax.serving.placement.traffic import ExpertTraffic
from tests.serving.engine.fake_runner import FakeRunner
from tests.serving.fake_server import CONFIG, MODEL


class Counter(FakeRunner):
    """Counts each step as one expert token everywhere; fails if a call would wait for a step."""

    def __init__(self) -> None:
        super().__init__(MODEL, CONFIG)
        self.begun, self.counted, self.may_wait_for = 0, 0, 0

    def begin_counts(self):
        self.begun += 1
        steps, self.counted = self.counted, 0

        def counts():
            assert self.may_wait_for >= steps, "the step has not run"
            return np.full((2, 2, 4), steps)

        return counts


def traffic_and_runner() -> tuple[ExpertTraffic, Counter]:
    runner = Counter()
    return ExpertTraffic(MODEL, CONFIG, runner), runner


def enqueue(traffic: ExpertTraffic, runner: Counter) -> None:
    traffic.step_enqueued()
    runner.counted += 1


def test_counts_come_when_the_steps_that_they_cover_are_fetched():
    traffic, runner = traffic_and_runner()
    for _ in range(2):
        enqueue(traffic, runner)
    traffic.step_fetched()
    traffic.request_counts()
    enqueue(traffic, runner)
    assert not traffic.collect()
    traffic.step_fetched()
    runner.may_wait_for = 2
    assert traffic.collect()
    assert (traffic.total_LSE == 2).all()
    assert (traffic.enqueued, traffic.fetched, traffic.counted) == (3, 2, 2)
    assert not traffic.collect()


def test_only_one_collection_is_pending_and_none_without_steps():
    traffic, runner = traffic_and_runner()
    traffic.request_counts()
    assert traffic.collect()
    assert runner.begun == 0
    enqueue(traffic, runner)
    traffic.request_counts()
    enqueue(traffic, runner)
    traffic.request_counts()
    assert runner.begun == 1
    runner.may_wait_for = 2
    for counted in (1, 2):
        traffic.step_fetched()
        assert traffic.collect()
        assert traffic.counted == counted
        assert (traffic.total_LSE == counted).all()
    assert runner.begun == 2


def test_without_steps_in_flight_collect_waits_for_no_request():
    traffic, runner = traffic_and_runner()
    enqueue(traffic, runner)
    traffic.step_fetched()
    traffic.request_counts()
    assert runner.begun == 0
    runner.may_wait_for = 1
    assert traffic.collect()
    assert (traffic.counted, runner.begun) == (1, 1)
