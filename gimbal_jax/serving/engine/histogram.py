"""Observations counted by bucket, where Prometheus' own class would be in the way: engines and scheduler know none."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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
