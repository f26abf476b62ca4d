"""One system beside another in the same scenarios: relative changes, their intervals, and a verdict on a claim."""

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
"""A rate, a share of capacity, or an end of those that were run."""


@dataclass(frozen=True)
class Reading:
    """How a measure is read off a run's record and written."""

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
"""Means over the requests of a run, or over its time."""

RESAMPLES = 2000
LEAST_RUNS = 3
"""Pairs of runs below which there is no verdict."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval, and how many values it is of. NaN without any."""

    mean: float
    low: float
    high: float
    count: int


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and its bootstrap interval: 2.5th and 97.5th percentile of the means of ``RESAMPLES`` resamplings.

    The values must be independent of each other. The same values give the same interval.
    """
    if not len(values):
        return Estimate(np.nan, np.nan, np.nan, 0)
    value_N = np.asarray(values, float)
    drawn = np.random.default_rng(0).integers(len(value_N), size=(RESAMPLES, len(value_N)))
    low, high = np.percentile(value_N[drawn].mean(axis=1), [2.5, 97.5])
    return Estimate(float(value_N.mean()), float(low), float(high), len(value_N))


def value(store: ResultStore, scenario: Scenario, measure: Measure) -> float:
    """What a run measured; NaN if it is not there or measured nothing."""
    if scenario not in store:
        return float("nan")
    found = MEASURES[measure].read(store[scenario])
    return float("nan") if found is None else found


def changes(
    store: ResultStore, scenarios: Sequence[Scenario], baselines: Sequence[Scenario], measure: Measure
) -> list[float]:
    """The measure in each scenario over that in its baseline, less 1; those that have both."""
    before_N = np.array([value(store, scenario, measure) for scenario in baselines])
    after_N = np.array([value(store, scenario, measure) for scenario in scenarios])
    known_N = np.isfinite(after_N) & (before_N > 0)
    return (after_N[known_N] / before_N[known_N] - 1).tolist()


def load_of(scenario: Scenario) -> float:
    """Its share of capacity or, without one, its rate."""
    return scenario.workload.rate if scenario.share_of_capacity is None else scenario.share_of_capacity


def at_load(load: Load, scenarios: Sequence[Scenario]) -> list[Scenario]:
    """Those scenarios of one set of costs that have this load."""
    if load == "all":
        return list(scenarios)
    loads = [load_of(scenario) for scenario in scenarios]
    ends = {"lowest": min(loads, default=0.0), "highest": max(loads, default=0.0)}
    wanted = ends[load] if isinstance(load, str) else load
    return [scenario for scenario in scenarios if load_of(scenario) == wanted]


def under_system(system: str, scenarios: Sequence[Scenario]) -> list[Scenario]:
    """The scenarios under another system."""
    return [replace(scenario, system=system) for scenario in scenarios]


def verdict(paper: float, ours: Estimate) -> Verdict:
    """What a relative change says about the paper's.

    ``not seen``: the interval holds 0. ``contrary``: it lies on the other side of 0. ``confirmed``: all of it is at
    least half of the paper's change. ``weaker``: all of it is on the paper's side, but not that far.
    ``too few runs``: of fewer than ``LEAST_RUNS`` pairs.
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
