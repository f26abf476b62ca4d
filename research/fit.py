"""Fit of the ``paper_like`` cost sets: constants that make the vLLM baseline as slow as the paper reports.

The fit uses the baseline alone: its mean latency at 4 requests/s (44 s; figure 9), its share of KV cache in use
(26-27 %; section 7.3) and its time to rearrange experts (0.72 s; section 2.2.2). It does not use the gains of gimbal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.optimize import brentq

from gimbal_jax.simulation.cost_sets import GRAPH, Assumptions
from gimbal_jax.simulation.costs import H100Costs
from gimbal_jax.simulation.scenario import KV_TOKENS, MODEL, Scenario, simulate_scenario
from gimbal_jax.simulation.simulate import Run
from gimbal_jax.simulation.workload import WorkloadConfig

LATENCY_S, KV_USE, REARRANGEMENT_S = 44.0, 0.265, 0.72
BASELINE = Scenario("vllm", workload=WorkloadConfig(lengths="random", requests=1000, rate=4.0))
Constant = Literal["stretch", "layer_s"]
SEARCHED: dict[Constant, tuple[float, float]] = {"stretch": (1.0, 40.0), "layer_s": (0.0, 6e-3)}
"""Range in which each constant is searched. Latency rises with each constant."""
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Fit:
    """Fitted constants, and measures of the baseline with them."""

    assumptions: Assumptions
    kv_tokens: int
    """KV cache tokens of an engine at which the paper's share of the cache is in use."""
    latency_s: float
    rearrangement_s: float
    running: float
    """Mean number of running requests of an engine, for comparison; 90 to 91 in the paper."""


def fit_to_paper(constant: Constant, seeds: Sequence[int], on_try: Callable[[float, float], None]) -> Fit:
    """Find the constant. ``on_try`` is called with each tried value and the mean latency in seconds with it."""

    def baseline(assumptions: Assumptions) -> list[Run]:
        return [baseline_run(assumptions, seed) for seed in seeds]

    def too_slow_by(value: float) -> float:
        latency_s = _mean_latency(baseline(_slower(constant, value)))
        on_try(value, latency_s)
        return latency_s - LATENCY_S

    value = brentq(too_slow_by, *SEARCHED[constant], rtol=TOLERANCE, xtol=TOLERANCE * SEARCHED[constant][1])
    first = baseline(_slower(constant, value))
    migration_stretch = REARRANGEMENT_S / mean_rearrangement(first)
    assumptions = replace(_slower(constant, value), migration_stretch=migration_stretch)
    runs = baseline(assumptions)
    kv_tokens = KV_TOKENS * float(np.mean([run.kv_use for run in runs])) / KV_USE
    return Fit(
        assumptions,
        round(kv_tokens),
        _mean_latency(runs),
        mean_rearrangement(runs),
        float(np.mean([run.running for run in runs])),
    )


def _slower(constant: Constant, value: float) -> Assumptions:
    return replace(GRAPH, stretch=value) if constant == "stretch" else replace(GRAPH, layer_s=value)


def baseline_run(assumptions: Assumptions, seed: int) -> Run:
    costs = H100Costs(assumptions, MODEL, BASELINE.mesh, BASELINE.exchange)
    return simulate_scenario(replace(BASELINE, seed=seed), costs=costs)


def _mean_latency(runs: Sequence[Run]) -> float:
    return float(np.mean([run.clients.e2e_mean_s for run in runs]))


def mean_rearrangement(runs: Sequence[Run]) -> float:
    """Return the mean seconds of migration per decision that moved experts."""
    applied = sum(record.outcome == "applied" for run in runs for record in run.placements)
    return sum(run.parts["migration"] for run in runs) / applied
