"""A runner that records the work and the duration of each step, and the routing of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from gimbal_jax.bench.measurement import Traffic
from gimbal_jax.scheduler.migration import Round
from gimbal_jax.serving.engine.plan import Plan, StepResult
from gimbal_jax.serving.engine.runner import Mark, Pending, Runner
from gimbal_jax.simulation.runner import engine_work
from gimbal_jax.simulation.work import EngineWork
from research.measured_costs import MeasuredStep


class TimedRunner:
    """A ``Runner`` around another one that records its steps. It runs no step ahead, so each has its own duration."""

    ahead = 0

    def __init__(self, runner: Runner, clock: Callable[[], float]) -> None:
        self.expert_bytes = runner.expert_bytes
        self._runner, self._clock = runner, clock
        self._steps: list[tuple[tuple[EngineWork, ...], float, float]] = []
        """Work of each step, its start and its end."""
        self._traffic: list[Traffic] = []

    @property
    def slot_of_expert_LE(self) -> np.ndarray:
        return self._runner.slot_of_expert_LE

    def enqueue(self, plans: Sequence[Plan], mark: Mark) -> Pending:
        work, began = tuple(engine_work(plan) for plan in plans), self._clock()
        wait = self._runner.enqueue(plans, mark)

        def pending() -> list[StepResult]:
            results = wait()
            self._steps.append((work, began, self._clock()))
            return results

        return pending

    def begin_counts(self) -> Callable[[], np.ndarray]:
        begun, slot_of_expert_LE = self._runner.begin_counts(), self.slot_of_expert_LE

        def counts() -> np.ndarray:
            counts_LSE = begun()
            self._traffic.append(Traffic(counts_LSE, slot_of_expert_LE))
            return counts_LSE

        return counts

    def migrate(self, layer: int, moves: Round) -> None:
        self._runner.migrate(layer, moves)

    def compiles_after_warmup(self) -> int:
        return self._runner.compiles_after_warmup()

    def take_steps(self) -> list[MeasuredStep]:
        """Return the steps since the last call except the last one, because its time to the next step is unknown."""
        steps, self._steps = self._steps, []
        return [
            MeasuredStep(work, ended - began, next_began - ended)
            for (work, began, ended), (_, next_began, _) in pairwise(steps)
        ]

    def take_traffic(self) -> list[Traffic]:
        """Return the counts since the last call, in the portions that the server fetched (every trace period)."""
        traffic, self._traffic = self._traffic, []
        return traffic
