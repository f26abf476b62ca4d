"""Measured kernel times as functions: exact where measured, linear between, counted where not.

Lines, not powers, lie between points: a kernel's time is a fixed part and a part by size, so halfway in size is
halfway in time. The table and its source: ``data/README.md``.
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
    """Software that it was measured with."""
    params: Mapping[str, str]
    seconds: float


@cache
def measured_kernels() -> tuple[Kernel, ...]:
    """The whole table."""
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
    """Time by size, or by batch and length."""

    @property
    def look_up(self) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
        """Times there, and where they are not within what was measured."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Time by one size. Beyond its ends the line through the last two points goes on, though never downwards."""

    size: np.ndarray
    """Rising."""
    seconds: np.ndarray

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """Through (size, seconds) of at least two sizes; what was measured twice counts with its mean."""
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
        far = 1e6 * size[-1]
        at_zero = max(0.0, seconds[0] - first * size[0])
        return np.array([0.0, *size, far]), np.array([at_zero, *seconds, seconds[-1] + last * (far - size[-1])])

    def leave_one_out(self) -> np.ndarray:
        """Relative error at each inner point if it is predicted from its two neighbours."""
        low, here, high = self.size[:-2], self.size[1:-1], self.size[2:]
        share = (here - low) / (high - low)
        return ((1 - share) * self.seconds[:-2] + share * self.seconds[2:]) / self.seconds[1:-1] - 1


@dataclass(frozen=True, eq=False)
class Grid:
    """Time by batch and length, bilinear. Each batch was measured up to a length of its own."""

    batch: np.ndarray
    length: np.ndarray
    seconds: np.ndarray
    """[batch, length]. What was not measured is on the line through the last two lengths of its batch."""
    longest: np.ndarray
    """Last measured length of each batch."""

    def look_up(self, batch: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        (i, u), (j, v) = _cell(self.batch, batch), _cell(self.length, length)
        below, above = self.seconds[i, j], self.seconds[i + 1, j]
        below = below + v * (self.seconds[i, j + 1] - below)
        above = above + v * (self.seconds[i + 1, j + 1] - above)
        longest = np.where(u > 0, self.longest[i + 1], self.longest[i])
        outside = (u < 0) | (u > 1) | (length < self.length[0]) | (length > longest)
        return below + u * (above - below), outside

    def lines(self) -> list[Curve]:
        """Its measured points by length for each batch, and by batch for each length."""
        measured = self.length <= self.longest[:, None]
        rows = zip(measured, self.seconds, strict=True)
        columns = zip(measured.T, self.seconds.T, strict=True)
        by_length = [Curve(self.length[which], row[which]) for which, row in rows]
        return by_length + [Curve(self.batch[which], column[which]) for which, column in columns]


def _cell(points: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Index of the point below, of all but the last, and how far it is to the next one."""
    i = np.searchsorted(points[1:-1], at, side="right")
    return i, (at - points[i]) / (points[i + 1] - points[i])


def curve(op: str, stack: str, along: str, **fixed: object) -> Curve:
    """Times of ``op`` by parameter ``along``, the others ``fixed``. ValueError if none were measured."""
    return Curve.through((float(kernel.params[along]), kernel.seconds) for kernel in _select(op, stack, fixed))


def grid(op: str, stack: str, batch: str, length: str) -> Grid:
    """Times of ``op`` by two parameters. ValueError if none were measured."""
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
    """Looks times up, and counts how often one was asked for outside of what was measured."""

    def __init__(self, times: Mapping[str, Times], derived: Collection[str] = ()) -> None:
        """``derived``: names of times that were not measured anywhere; each of their prices is outside."""
        self.times, self._derived = times, derived
        self.outside: Counter[str] = Counter()

    def seconds(self, name: str, size: np.ndarray, length: np.ndarray | None = None) -> np.ndarray:
        """Times at sizes, or at batches and lengths. Size or batch 0 is nothing to do, and takes no time."""
        seconds, outside = self.times[name].look_up(*((size,) if length is None else (size, length)))
        runs = size > 0
        self.count(name, int(np.count_nonzero(runs if name in self._derived else outside & runs)))
        return seconds * runs

    def count(self, name: str, prices: int = 1) -> None:
        """Note that so many prices were extrapolated."""
        if prices:
            self.outside[name] += prices
