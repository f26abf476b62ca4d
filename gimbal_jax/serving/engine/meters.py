"""Meters of the engine thread: a histogram by bucket and the time of each part of a tick."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PhaseTimes:
    """How long one part of a tick took, over the last ticks that had a step."""

    name: str
    """schedule, batch, enqueue, wait, commit, emit, or other (traces, placement, inboxes)."""
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


class Histogram:
    """Observations since start. Any thread may observe, and any may read."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        bucket = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[bucket] += 1
            self._sum += value

    def record(self) -> HistogramRecord:
        with self._lock:
            return HistogramRecord(self._bounds, tuple(self._counts), self._sum)


def total(records: Iterable[HistogramRecord]) -> HistogramRecord:
    """All observations of at least one histogram, of the same bounds."""
    first, *others = records
    counts = (first.counts, *(record.counts for record in others))
    return HistogramRecord(
        first.bounds, tuple(map(sum, zip(*counts, strict=True))), first.sum + sum(record.sum for record in others)
    )


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
