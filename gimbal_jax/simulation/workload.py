"""What arrives: requests with their times, lengths and topics.

Lengths are (prompt, output) pairs of real requests, resampled. Five shapes reweigh the pairs of BurstGPT by prompt
length, as figure 8 of the paper does; it does not give its rule, so this one is ours: ``SHAPE_BINS`` equal bins from
the 1st to the 99th percentile of the prompt lengths (what lies outside counts to the outermost), each with the share of
the requests that its shape gives it, and inside a bin all pairs alike. Outputs stay those that such prompts had.
N: requests, or rows of a trace.
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
# Share of a bin by its place, from -1 (shortest prompts) over 0 (middle) to 1; "random" is the trace as it is.
_SHARE_OF_BIN: dict[Shape, Callable[[np.ndarray], np.ndarray]] = {
    "central": lambda place: np.exp(-4.5 * place**2),  # a bell of 3 standard deviations to each side
    "descending": lambda place: 1.1 - place,
    "two-end": lambda place: place**4,
    "average": np.ones_like,
}


@dataclass(frozen=True)
class Arrival:
    """One request."""

    time_s: float
    input_tokens: int
    output_tokens: int
    topic: int | None = 0
    """None: the topic of whichever source gets it."""
    engine: int | None = None
    """Where it must go; None: dispatch decides."""


@dataclass(frozen=True)
class WorkloadConfig:
    """How many requests come, how long they are, and when."""

    lengths: Lengths = "random"
    """A real trace, or BurstGPT in one of the five shapes (``random``: as it is)."""
    requests: int = 1000
    rate: float = 4.0
    """Requests per second; means nothing where all come at once."""
    arrivals: Arrivals = "poisson"
    """``bursty``: gamma gaps. ``trace``: the gaps of the trace, all scaled alike to give exactly ``rate``; its requests
    come in its order too, from a row drawn at random and round at the end. ``at-once``: all at 0."""
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
    """The usable rows of a trace, and how often a workload takes each."""

    time_N: np.ndarray
    """Seconds, rising."""
    input_N: np.ndarray
    output_N: np.ndarray
    weight_N: np.ndarray
    """Chance of each row; they sum to 1."""


@cache
def length_table(lengths: Lengths) -> LengthTable:
    """What ``lengths`` draws from; shared, so do not write to it."""
    name, time_column = _FILES[lengths if lengths in TRACES else "burstgpt"]
    with files("gimbal_jax").joinpath("data", name).open(encoding="utf-8") as file:
        rows = [
            (float(row[time_column]), int(row["input_tokens"]), int(row["output_tokens"]))
            for row in csv.DictReader(file)
        ]
    time_N, input_N, output_N = (np.array(column) for column in zip(*(r for r in rows if min(r[1:]) > 0), strict=True))
    return LengthTable(time_N, input_N, output_N, _weights(lengths, input_N))


def length_bins(input_N: np.ndarray) -> np.ndarray:
    """Bin of each prompt length, from 0 to ``SHAPE_BINS`` - 1."""
    shortest, longest = np.percentile(input_N, [1, 99])
    edges = np.linspace(shortest, longest, SHAPE_BINS + 1)
    return np.digitize(input_N, edges[1:-1])


def bin_shares(shape: Shape) -> np.ndarray:
    """Share of the requests that a shape gives to each bin; not for ``random``, which gives none."""
    share = _SHARE_OF_BIN[shape](np.linspace(-1, 1, SHAPE_BINS))
    return share / share.sum()


def make_workload(config: WorkloadConfig, router: Router, seed: int) -> tuple[Arrival, ...]:
    """Requests by rising time; topics are drawn by the router.

    Lengths, times and topics have random numbers of their own: at another rate the same requests come, closer together.
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
            before_N = np.append(before_N.mean(), before_N)  # before the first row: as if from the last one to it
            gaps = before_N[in_order_N]
            together = not gaps.any()  # some rows of a trace are
            gaps = np.ones(count) if together else gaps * count / gaps.sum()
        case "at-once":
            gaps = np.zeros(count)
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
