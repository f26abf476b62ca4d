"""Comparison of two systems in the same scenarios: relative changes, their intervals, and a verdict on a claim."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from gimbal_jax.simulation.scenario import Scenario
from research.store import ResultStore

Verdict = Literal["confirmed", "weaker", "not seen", "contrary", "too few runs"]
Measure = Literal[
    "e2e",
    "ttft",
    "tpot",
    "p99_ttft",
    "throughput",
    "running",
    "kv_use",
    "prompt_gap",
    "imbalance",
    "remote_share",
    "far_share",
    "far_bytes",
    "exchange_share",
    "migration_share",
    "experts_moved",
]
Load = Literal["all", "lowest", "highest"] | float
"""A rate, a share of capacity, or the lowest or highest load that was run."""


@dataclass(frozen=True)
class Reading:
    """Label of a measure, function that reads it from a run's record, and format in which it is written."""

    label: str
    read: Callable[[Mapping[str, Any]], float | None]
    form: str


MEASURES: Mapping[Measure, Reading] = {
    "e2e": Reading("latency, s", lambda run: run["clients"]["e2e_mean_s"], ",.2f"),
    "ttft": Reading("TTFT, s", lambda run: run["clients"]["ttft_mean_s"], ",.3f"),
    "tpot": Reading("TPOT, s", lambda run: run["clients"]["tpot_mean_s"], ",.4f"),
    "p99_ttft": Reading("P99 TTFT, s", lambda run: run["clients"]["ttft_p99_s"], ",.3f"),
    "throughput": Reading("requests/s", lambda run: run["requests_per_s"], ",.2f"),
    "running": Reading("running requests per engine", lambda run: run["running"], ",.1f"),
    "kv_use": Reading("KV cache in use", lambda run: run["kv_use"], ".1%"),
    "prompt_gap": Reading("gap of prompt tokens/s", lambda run: run["prompt_gap_tokens_per_s"], ",.0f"),
    "imbalance": Reading("fullest rank over mean", lambda run: run["imbalance"], ".3f"),
    "remote_share": Reading("remote share", lambda run: run["remote_share"], ".1%"),
    "far_share": Reading("share across nodes", lambda run: run["far_share"], ".1%"),
    "far_bytes": Reading("MB a token across nodes", lambda run: run["far_bytes_per_token"] / 1e6, ".2f"),
    "exchange_share": Reading("time in exchange", lambda run: _share(run["seconds_by_part"], "exchange"), ".1%"),
    "migration_share": Reading("time in migration", lambda run: _share(run["seconds_by_part"], "migration"), ".1%"),
    "experts_moved": Reading("experts moved", lambda run: run["experts_moved"], ",.0f"),
}
"""Label, reader and format of each measure: means over the requests of a run, or over its time."""

RESAMPLES = 2000
LEAST_RUNS = 3
"""Least number of pairs of runs for a verdict."""


@dataclass(frozen=True)
class Estimate:
    """Mean with its 95 % interval and the number of values. Mean and interval are NaN if there is no value."""

    mean: float
    low: float
    high: float
    count: int


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean and its 95 % bootstrap interval.

    The interval goes from the 2.5th to the 97.5th percentile of the means of ``RESAMPLES`` resamplings.
    The values must be independent of each other. Equal values give equal intervals.
    """
    if not len(values):
        return Estimate(np.nan, np.nan, np.nan, 0)
    value_N = np.asarray(values, float)
    drawn = np.random.default_rng(0).integers(len(value_N), size=(RESAMPLES, len(value_N)))
    low, high = np.percentile(value_N[drawn].mean(axis=1), [2.5, 97.5])
    return Estimate(float(value_N.mean()), float(low), float(high), len(value_N))


def value(store: ResultStore, scenario: Scenario, measure: Measure) -> float:
    """Return a measure of a run; NaN if the store lacks the run or the run has no value."""
    if scenario not in store:
        return float("nan")
    found = MEASURES[measure].read(store[scenario])
    return float("nan") if found is None else found


def changes(
    store: ResultStore, scenarios: Sequence[Scenario], baselines: Sequence[Scenario], measure: Measure
) -> list[float]:
    """Return the measure in each scenario over that in its baseline, less 1, for the pairs that have both values."""
    before_N = np.array([value(store, scenario, measure) for scenario in baselines])
    after_N = np.array([value(store, scenario, measure) for scenario in scenarios])
    known_N = np.isfinite(after_N) & (before_N > 0)
    return (after_N[known_N] / before_N[known_N] - 1).tolist()


def load_of(scenario: Scenario) -> float:
    """Return the scenario's share of capacity or, if it has none, its rate."""
    return scenario.workload.rate if scenario.share_of_capacity is None else scenario.share_of_capacity


def at_load(load: Load, scenarios: Sequence[Scenario]) -> list[Scenario]:
    """Return the scenarios of one cost set that have this load."""
    if load == "all":
        return list(scenarios)
    loads = [load_of(scenario) for scenario in scenarios]
    ends = {"lowest": min(loads, default=0.0), "highest": max(loads, default=0.0)}
    wanted = ends[load] if isinstance(load, str) else load
    return [scenario for scenario in scenarios if load_of(scenario) == wanted]


def under_system(system: str, scenarios: Sequence[Scenario]) -> list[Scenario]:
    """Return the scenarios with ``system`` as their system."""
    return [replace(scenario, system=system) for scenario in scenarios]


def verdict(paper: float, ours: Estimate) -> Verdict:
    """Judge the paper's relative change by ours.

    ``not seen``: the interval contains 0. ``contrary``: it lies on the other side of 0. ``confirmed``: all of it is at
    least half of the paper's change. ``weaker``: all of it is on the paper's side, but part of it is below that half.
    ``too few runs``: there are fewer than ``LEAST_RUNS`` pairs.
    """
    if ours.count < LEAST_RUNS:
        return "too few runs"
    if ours.low <= 0 <= ours.high:
        return "not seen"
    if (ours.mean > 0) != (paper > 0):
        return "contrary"
    return "confirmed" if min(abs(ours.low), abs(ours.high)) >= abs(paper) / 2 else "weaker"


def _share(seconds: Mapping[str, float], part: str) -> float:
    return seconds.get(part, 0.0) / sum(seconds.values())
