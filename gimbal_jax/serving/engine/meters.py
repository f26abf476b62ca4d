"""Meters of the engine thread: histograms, and the time of each phase of a tick."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

PHASES = ("schedule", "batch", "enqueue", "wait", "commit", "emit", "other")
TICKS = 1024
"""Ticks that the timer keeps, the last ones that had a step. Memory does not grow with the server's uptime."""


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds that one phase of a tick took, over the last ticks that had a step."""

    name: str
    """One of PHASES. "other" is traces, placement and inboxes."""
    mean_s: float
    p50_s: float
    p99_s: float


@dataclass(frozen=True)
class HistogramRecord:
    """A histogram at one moment."""

    bounds: tuple[float, ...]
    """Upper bounds of the buckets, rising; a bound belongs to its bucket, as in Prometheus."""
    counts: tuple[int, ...]
    """Observations in each bucket, and in one more above all bounds."""
    sum: float
    """Sum of all observations."""


class Histogram:
    """Observations since start. Any thread may observe, and any may read."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Count one observation."""
        bucket = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[bucket] += 1
            self._sum += value

    def record(self) -> HistogramRecord:
        """Return the histogram of now."""
        with self._lock:
            return HistogramRecord(self._bounds, tuple(self._counts), self._sum)


def total(records: Iterable[HistogramRecord]) -> HistogramRecord:
    """Return all observations of at least one histogram; the bounds must be equal."""
    first, *others = records
    counts = (first.counts, *(record.counts for record in others))
    return HistogramRecord(
        first.bounds, tuple(map(sum, zip(*counts, strict=True))), first.sum + sum(record.sum for record in others)
    )


class PhaseTimer:
    """Measures how a tick's time is divided between PHASES. The engine thread owns it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._marked = 0.0
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._seconds_TP = np.zeros((TICKS, len(PHASES)), np.float32)
        self._ticks = 0

    def begin(self) -> None:
        """Start a tick."""
        self._marked = self._clock()
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def mark(self, phase: str) -> None:
        """Add the time since the last call, or since ``begin``, to a phase. KeyError for an unknown phase."""
        now = self._clock()
        self._seconds[phase] += now - self._marked
        self._marked = now

    def end(self) -> None:
        """End a tick that had a step. A tick without this call is not counted."""
        self._seconds_TP[self._ticks % TICKS] = list(self._seconds.values())
        self._ticks += 1

    def times(self) -> tuple[PhaseTimes, ...]:
        """Return the times of all phases; empty before the first step."""
        seconds_TP = self._seconds_TP[: self._ticks]
        if not len(seconds_TP):
            return ()
        mean_P, (p50_P, p99_P) = seconds_TP.mean(axis=0), np.percentile(seconds_TP, (50, 99), axis=0)
        columns = mean_P.tolist(), p50_P.tolist(), p99_P.tolist()
        return tuple(PhaseTimes(*of_phase) for of_phase in zip(PHASES, *columns, strict=True))
