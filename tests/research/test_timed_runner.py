"""The runner that records its steps."""

from itertools import count

import numpy as np

from gimbal_jax.config import EngineConfig
from gimbal_jax.scheduler.migration import Round
from gimbal_jax.serving.engine.plan import Chunk, Plan, StepResult
from gimbal_jax.serving.engine.running_batch import RunningBatch
from research.timed_runner import TimedRunner

RESULT = StepResult(np.zeros(0, np.int32), np.zeros(0, np.int32), {}, {})


class RecordingRunner:
    """A runner that counts a token per step and records its calls."""

    expert_bytes, ahead = 7, 1
    slot_of_expert_LE = np.array([[0, 1]], np.int32)

    def __init__(self) -> None:
        self.plans: list = []

    def enqueue(self, plans, mark):
        self.plans.append(plans)
        return lambda: [RESULT]

    def begin_counts(self):
        counts_LSE = np.array([[[len(self.plans), 0]]])
        return lambda: counts_LSE

    def migrate(self, layer, moves):
        self.slot_of_expert_LE = np.array([[1, 0]], np.int32)

    def compiles_after_warmup(self):
        return 3


def plan(tokens: int) -> Plan:
    nobody = RunningBatch(EngineConfig()).decode(np.zeros(0, np.intp))
    return Plan(nobody, (Chunk(0, np.zeros(tokens, np.int32), 5, np.zeros(1, np.int32), None),), tiles=1)


def run(runner: TimedRunner, tokens: int) -> None:
    assert runner.enqueue([plan(tokens)], lambda name: None)() == [RESULT]


def test_durations_of_steps_and_of_the_host_between_them():
    # The clock is read at the start and the end of each step: steps of 1 s, with 2, 4, ... s between them.
    ticks = iter([0.0, 1.0, 3.0, 4.0, 8.0, 9.0])
    runner = TimedRunner(RecordingRunner(), lambda: next(ticks))
    for tokens in (1, 2, 3):
        run(runner, tokens)
    steps = runner.take_steps()
    assert [(step.seconds, step.host_s) for step in steps] == [(1.0, 2.0), (1.0, 4.0)]
    assert [step.engines_S[0].prefill for step in steps] == [((5, 1),), ((5, 2),)]
    assert runner.take_steps() == []


def test_counts_are_returned_and_kept_with_their_placement():
    inner, clock = RecordingRunner(), count()
    runner = TimedRunner(inner, lambda: next(clock))
    run(runner, 1)
    counts = runner.begin_counts()
    runner.migrate(0, Round(np.array([0]), np.array([1]), np.array([1, 0])))
    assert counts().tolist() == [[[1, 0]]]
    runner.begin_counts()()
    assert [t.slot_of_expert_LE.tolist() for t in runner.take_traffic()] == [[[0, 1]], [[1, 0]]]
    assert runner.take_traffic() == []
    assert (runner.expert_bytes, runner.compiles_after_warmup()) == (7, 3)
