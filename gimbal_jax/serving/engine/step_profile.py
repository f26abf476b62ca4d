"""Where the time of a tick goes: a stopwatch that is read at the end of each of its parts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gimbal_jax.serving.core.status import PhaseTimes

PHASES = ("schedule", "batch", "enqueue", "wait", "commit", "emit", "other")
TICKS = 1024
"""The last ticks that had a step; their times take the same memory however long the server runs."""


class StepProfile:
    """The engine thread's own."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lapped = 0.0
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._seconds_TP = np.zeros((TICKS, len(PHASES)), np.float32)
        self._ticks = 0

    def begin(self) -> None:
        """A tick begins."""
        self._lapped = self._clock()
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def lap(self, name: str) -> None:
        """What went on since the last lap, or since ``begin``, was this phase. KeyError for an unknown one."""
        now = self._clock()
        self._seconds[name] += now - self._lapped
        self._lapped = now

    def end(self) -> None:
        """The tick has ended, and had a step."""
        self._seconds_TP[self._ticks % TICKS] = list(self._seconds.values())
        self._ticks += 1

    def times(self) -> tuple[PhaseTimes, ...]:
        """Of all phases; empty before the first step."""
        seconds_TP = self._seconds_TP[: self._ticks]
        if not len(seconds_TP):
            return ()
        mean_P, (p50_P, p99_P) = seconds_TP.mean(axis=0), np.percentile(seconds_TP, (50, 99), axis=0)
        columns = mean_P.tolist(), p50_P.tolist(), p99_P.tolist()
        return tuple(PhaseTimes(*of_phase) for of_phase in zip(PHASES, *columns, strict=True))
