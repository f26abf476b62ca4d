"""Measured kernel times as functions: exact at measured points, linear between them, and counted outside of them.

Interpolation is linear, because a kernel's time is a fixed part plus a part proportional to its size.
``data/README.md`` describes the table and gives its source.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Protocol

import numpy as np

TABLE = "h100_sxm_kernels_qwen3_30b_a3b.csv"


@dataclass(frozen=True)
class Kernel:
    """One measured point."""

    op: str
    stack: str
    """Software with which it was measured."""
    params: Mapping[str, str]
    seconds: float


@cache
def measured_kernels() -> tuple[Kernel, ...]:
    """Return all points of the table."""
    text = files("gimbal_jax.simulation").joinpath("data", TABLE).read_text(encoding="utf-8")
    return tuple(
        Kernel(
            op=row["op"],
            stack=row["stack"],
            params=dict(pair.split("=") for pair in row["params"].split(";")),
            seconds=1e-6 * float(row["latency_us"]),
        )
        for row in csv.DictReader(text.splitlines())
    )


class Times(Protocol):
    """Times by size, or by batch and length."""

    @property
    def look_up(self) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
        """Function that returns the times, and a mask of those that lie outside of what was measured."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Time by one size. Beyond each end the line through the last two points continues, but never falls."""

    size: np.ndarray
    """Sizes, in rising order."""
    seconds: np.ndarray

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """Return the curve through (size, seconds) of at least two sizes. Repeated sizes count with their mean."""
        size, seconds = np.array(list(points)).T
        sizes, which = np.unique(size, return_inverse=True)
        return cls(sizes, np.bincount(which, seconds) / np.bincount(which))

    def at(self, size: np.ndarray) -> np.ndarray:
        return np.interp(size, *self._extended)

    def look_up(self, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.at(size), (size < self.size[0]) | (size > self.size[-1])

    @cached_property
    def _extended(self) -> tuple[np.ndarray, np.ndarray]:
        size, seconds = self.size, self.seconds
        first, last = np.maximum(np.diff(seconds)[[0, -1]] / np.diff(size)[[0, -1]], 0.0)
        far = 1e6 * size[-1]  # a point beyond all sizes in use, so that np.interp extrapolates
        at_zero = max(0.0, seconds[0] - first * size[0])
        return np.array([0.0, *size, far]), np.array([at_zero, *seconds, seconds[-1] + last * (far - size[-1])])

    def leave_one_out(self) -> np.ndarray:
        """Return the relative error at each inner point if it is predicted from its two neighbours."""
        low, here, high = self.size[:-2], self.size[1:-1], self.size[2:]
        share = (here - low) / (high - low)
        return ((1 - share) * self.seconds[:-2] + share * self.seconds[2:]) / self.seconds[1:-1] - 1


@dataclass(frozen=True, eq=False)
class Grid:
    """Time by batch and length, with bilinear interpolation. The longest measured length differs between batches."""

    batch: np.ndarray
    length: np.ndarray
    seconds: np.ndarray
    """[batch, length]. Unmeasured points lie on the line through the last two lengths of their batch."""
    longest: np.ndarray
    """Longest measured length of each batch."""

    def look_up(self, batch: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        (i, u), (j, v) = _cell(self.batch, batch), _cell(self.length, length)
        below, above = self.seconds[i, j], self.seconds[i + 1, j]
        below = below + v * (self.seconds[i, j + 1] - below)
        above = above + v * (self.seconds[i + 1, j + 1] - above)
        longest = np.where(u > 0, self.longest[i + 1], self.longest[i])
        outside = (u < 0) | (u > 1) | (length < self.length[0]) | (length > longest)
        return below + u * (above - below), outside

    def lines(self) -> list[Curve]:
        """Return the measured points as curves: by length for each batch, and by batch for each length."""
        measured = self.length <= self.longest[:, None]
        rows = zip(measured, self.seconds, strict=True)
        columns = zip(measured.T, self.seconds.T, strict=True)
        by_length = [Curve(self.length[which], row[which]) for which, row in rows]
        return by_length + [Curve(self.batch[which], column[which]) for which, column in columns]


def _cell(points: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the point below (never the last one), and the fraction of the way to the next point."""
    i = np.searchsorted(points[1:-1], at, side="right")
    return i, (at - points[i]) / (points[i + 1] - points[i])


def curve(op: str, stack: str, along: str, **fixed: object) -> Curve:
    """Return the times of ``op`` by ``along``, with ``fixed`` other parameters. Raises ValueError if there are none."""
    return Curve.through((float(kernel.params[along]), kernel.seconds) for kernel in _select(op, stack, fixed))


def grid(op: str, stack: str, batch: str, length: str) -> Grid:
    """Return the times of ``op`` by two parameters. Raises ValueError if none were measured."""
    points: dict[float, dict[float, float]] = {}
    for kernel in _select(op, stack, {}):
        points.setdefault(float(kernel.params[batch]), {})[float(kernel.params[length])] = kernel.seconds
    batches = sorted(points)
    lengths = np.array(sorted({length for row in points.values() for length in row}))
    rows = [Curve.through(points[b].items()) for b in batches]
    seconds = np.stack([row.at(lengths) for row in rows])
    return Grid(np.array(batches), lengths, seconds, np.array([row.size[-1] for row in rows]))


def _select(op: str, stack: str, fixed: Mapping[str, object]) -> list[Kernel]:
    wanted = {name: str(value) for name, value in fixed.items()}.items()
    of_op = [kernel for kernel in measured_kernels() if (kernel.op, kernel.stack) == (op, stack)]
    kernels = [kernel for kernel in of_op if wanted <= kernel.params.items()]
    if not kernels:
        raise ValueError(f"no kernel {op} of {stack} with {dict(wanted)} was measured")
    return kernels


class Prices:
    """Look-up of times that counts the prices outside of what was measured."""

    def __init__(self, times: Mapping[str, Times], derived: Collection[str] = ()) -> None:
        """Take ``times`` by name. A rule scaled those named in ``derived``, so all of their prices count as outside."""
        self.times, self._derived = times, derived
        self.outside: Counter[str] = Counter()

    def seconds(self, name: str, size: np.ndarray, length: np.ndarray | None = None) -> np.ndarray:
        """Return the times at sizes, or at batches and lengths. Size or batch 0 means no work, and takes no time."""
        seconds, outside = self.times[name].look_up(*((size,) if length is None else (size, length)))
        runs = size > 0
        self.count(name, int(np.count_nonzero(runs if name in self._derived else outside & runs)))
        return seconds * runs

    def count(self, name: str, prices: int = 1) -> None:
        """Count ``prices`` extrapolated prices of ``name``."""
        if prices:
            self.outside[name] += prices
