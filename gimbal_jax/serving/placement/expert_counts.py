"""The routing counts of steps, fetched from the devices without ever waiting for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gimbal_jax.serving.engine.runner import Runner


class StepCounts:
    """Which steps are on the way, and which are counted. The engine thread's own."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._enqueued = self._fetched = self._covered = 0
        self._pending: tuple[Callable[[], np.ndarray], int] | None = None
        """What gives the counts of a collection, and how many of them are its steps."""

    @property
    def in_flight(self) -> int:
        """Steps whose results are not fetched."""
        return self._enqueued - self._fetched

    @property
    def uncounted(self) -> int:
        """Steps enqueued whose counts ``take`` has not given."""
        return self._enqueued - self._covered

    def enqueued(self) -> None:
        """A step was."""
        self._enqueued += 1

    def fetched(self) -> None:
        """The results of the oldest step in flight were."""
        self._fetched += 1

    def begin(self) -> None:
        """Have the devices set aside what all steps enqueued so far count, unless that was asked for already."""
        if self._pending is None and self.uncounted:
            self._pending = self._runner.begin_counts(), self.uncounted

    def take(self) -> tuple[np.ndarray, int] | None:
        """The counts [L, S, E] that ``begin`` asked for, and of how many steps; None until these are fetched."""
        if self._pending is None:
            return None
        counts, steps = self._pending
        if self._fetched < self._covered + steps:
            return None
        self._pending = None
        self._covered += steps
        return counts(), steps
