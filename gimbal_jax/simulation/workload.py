"""The workload: requests with their arrival times, lengths and topics.

Lengths are (prompt, output) pairs of real requests, resampled. Five shapes reweigh the pairs of BurstGPT by prompt
length, as in figure 8 of the paper. The paper does not give its rule, so this rule is ours. ``SHAPE_BINS`` equal bins
span the 1st to the 99th percentile of the prompt lengths, and the outermost bins include the lengths outside. A shape
gives each bin its share of the requests. All pairs of a bin are equally likely, and prompts keep their real outputs.
Axis N: requests, or rows of a trace.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal, get_args

import numpy as np

from gimbal_jax.simulation.routing import Router

Trace = Literal["azure-conv", "azure-code", "burstgpt"]
Shape = Literal["random", "central", "descending", "two-end", "average"]
Lengths = Literal[Trace, Shape]
Arrivals = Literal["poisson", "bursty", "trace", "at-once"]

TRACES: tuple[Trace, ...] = get_args(Trace)
SHAPES: tuple[Shape, ...] = get_args(Shape)
SHAPE_BINS = 8

_FILES: dict[Trace, tuple[str, str]] = {
    "azure-conv": ("azure_llm_2023_conv.csv", "arrival_s"),
    "azure-code": ("azure_llm_2023_code.csv", "arrival_s"),
    "burstgpt": ("burstgpt_1_first400.csv", "timestamp_s"),
}
# Share of a bin by its place, from -1 (shortest prompts) over 0 (middle) to 1. "random" leaves the trace unchanged.
_SHARE_OF_BIN: dict[Shape, Callable[[np.ndarray], np.ndarray]] = {
    "central": lambda place: np.exp(-4.5 * place**2),  # a bell of 3 standard deviations to each side
    "descending": lambda place: 1.1 - place,
    "two-end": lambda place: place**4,
    "average": np.ones_like,
}


@dataclass(frozen=True)
class Arrival:
    """One request of a workload."""

    time_s: float
    input_tokens: int
    output_tokens: int
    topic: int | None = 0
    """Topic of its tokens; None for the topic of the source that dispatch chooses."""
    engine: int | None = None
    """Engine that must run it; None if dispatch decides."""


@dataclass(frozen=True)
class WorkloadConfig:
    """Number, lengths and arrival times of the requests."""

    lengths: Lengths = "random"
    """A real trace, or BurstGPT in one of the five shapes (``random``: unchanged)."""
    requests: int = 1000
    rate: float = 4.0
    """Requests per second; has no effect on ``at-once``."""
    arrivals: Arrivals = "poisson"
    """``bursty``: gamma gaps. ``trace``: gaps of the trace from a random row on, scaled to exactly ``rate``, and its
    lengths in the same order if ``lengths`` is not reshaped. ``at-once``: all requests at time 0."""
    burstiness: float = 2.0
    """Coefficient of variation of ``bursty`` gaps; 1 is Poisson."""

    def __post_init__(self) -> None:
        for name, choices in ("lengths", (*TRACES, *SHAPES)), ("arrivals", get_args(Arrivals)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)}")
        if self.requests < 1:
            raise ValueError(f"requests must be at least 1, not {self.requests}")
        for name in ("rate", "burstiness"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be above 0 and finite, not {getattr(self, name)}")


@dataclass(frozen=True, eq=False)
class LengthTable:
    """The usable rows of a trace, and the chance of each row in a workload."""

    time_N: np.ndarray
    """Arrival times in seconds, in rising order."""
    input_N: np.ndarray
    output_N: np.ndarray
    weight_N: np.ndarray
    """Chance of each row. The sum is 1."""


@cache
def length_table(lengths: Lengths) -> LengthTable:
    """Return the table that ``lengths`` draws from. It is cached, so do not write to it."""
    name, time_column = _FILES[lengths if lengths in TRACES else "burstgpt"]
    with files("gimbal_jax").joinpath("data", name).open(encoding="utf-8") as file:
        rows = [
            (float(row[time_column]), int(row["input_tokens"]), int(row["output_tokens"]))
            for row in csv.DictReader(file)
        ]
    # Rows with zero tokens are failed requests.
    time_N, input_N, output_N = (np.array(column) for column in zip(*(r for r in rows if min(r[1:]) > 0), strict=True))
    return LengthTable(time_N, input_N, output_N, _weights(lengths, input_N))


def length_bins(input_N: np.ndarray) -> np.ndarray:
    """Return the bin of each prompt length, from 0 to ``SHAPE_BINS`` - 1."""
    shortest, longest = np.percentile(input_N, [1, 99])
    edges = np.linspace(shortest, longest, SHAPE_BINS + 1)
    return np.digitize(input_N, edges[1:-1])


def bin_shares(shape: Shape) -> np.ndarray:
    """Return the share of the requests in each bin. ``random`` is not allowed, because it has no shares."""
    share = _SHARE_OF_BIN[shape](np.linspace(-1, 1, SHAPE_BINS))
    return share / share.sum()


def make_workload(config: WorkloadConfig, router: Router, seed: int) -> tuple[Arrival, ...]:
    """Return the requests of a workload, sorted by time. The router draws their topics.

    Lengths, times and topics have separate random generators, so another rate gives the same lengths at scaled times.
    """
    for_lengths, for_times, for_topics = np.random.default_rng(seed).spawn(3)
    table, count = length_table(config.lengths), config.requests
    rows = len(table.time_N)
    match config.arrivals:
        case "poisson":
            gaps = for_times.exponential(size=count)
        case "bursty":
            variance = config.burstiness**2
            gaps = for_times.gamma(1 / variance, variance, size=count)
        case "trace":
            first = for_times.integers(rows)
            in_order_N = (first + np.arange(count)) % rows
            before_N = np.diff(table.time_N)
            before_N = np.append(before_N.mean(), before_N)  # the first row has no gap, so it gets the mean gap
            gaps = before_N[in_order_N]
            together = not gaps.any()  # all chosen rows may have one time: then space them evenly
            gaps = np.ones(count) if together else gaps * count / gaps.sum()
        case "at-once":
            gaps = np.zeros(count)
    # A whole trace keeps lengths and gaps together. A reshaped one draws lengths by weight.
    if config.arrivals == "trace" and config.lengths not in _SHARE_OF_BIN:
        row_N = in_order_N
    else:
        row_N = for_lengths.choice(rows, count, p=table.weight_N)
    times_s = (np.cumsum(gaps) / config.rate).tolist()
    topics = router.draw_topics(times_s, for_topics)
    lengths = zip(table.input_N[row_N].tolist(), table.output_N[row_N].tolist(), strict=True)
    return tuple(Arrival(time_s, *pair, topic) for time_s, pair, topic in zip(times_s, lengths, topics, strict=True))


def _weights(lengths: Lengths, input_N: np.ndarray) -> np.ndarray:
    if lengths not in _SHARE_OF_BIN:
        return np.full(len(input_N), 1 / len(input_N))
    bin_N = length_bins(input_N)
    return (bin_shares(lengths) / np.bincount(bin_N, minlength=SHAPE_BINS))[bin_N]
