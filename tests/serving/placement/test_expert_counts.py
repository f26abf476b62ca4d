import numpy as np

from gimbal_jax.serving.placement.expert_counts import StepCounts
from tests.serving.engine.fake_runner import FakeRunner
from tests.serving.fake_server import CONFIG, MODEL


class Counter(FakeRunner):
    """Counts each step as one; says when somebody would wait for it."""

    def __init__(self) -> None:
        super().__init__(MODEL, CONFIG)
        self.begun, self.counted, self.may_wait_for = 0, 0, 0

    def begin_counts(self):
        self.begun += 1
        steps, self.counted = self.counted, 0

        def counts():
            assert self.may_wait_for >= steps, "the step has not run"
            return np.full((1, 1, 1), steps)

        return counts


def counts_and_runner() -> tuple[StepCounts, Counter]:
    runner = Counter()
    return StepCounts(runner), runner


def enqueue(counts: StepCounts, runner: Counter) -> None:
    counts.enqueued()
    runner.counted += 1


def test_counts_come_when_the_steps_that_they_cover_are_fetched():
    counts, runner = counts_and_runner()
    for _ in range(2):
        enqueue(counts, runner)
    counts.fetched()
    counts.begin()
    enqueue(counts, runner)
    assert counts.take() is None
    counts.fetched()
    runner.may_wait_for = 2
    taken = counts.take()
    assert taken is not None and (int(taken[0].sum()), taken[1]) == (2, 2)
    assert (counts.uncounted, counts.in_flight) == (1, 1)
    assert counts.take() is None


def test_one_collection_at_a_time_and_none_of_nothing():
    counts, runner = counts_and_runner()
    counts.begin()
    assert runner.begun == 0
    enqueue(counts, runner)
    counts.begin()
    enqueue(counts, runner)
    counts.begin()
    assert runner.begun == 1
    runner.may_wait_for = 2
    total = 0
    for _ in range(2):
        counts.fetched()
        taken = counts.take()
        assert taken is not None
        total += int(taken[0].sum())
        counts.begin()
    assert (total, counts.uncounted) == (2, 0)
