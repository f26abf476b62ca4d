"""A store of made-up results for all tables and pictures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gimbal_jax.simulation.scenario import Scenario
from research.comparison import load_of
from research.experiments import Scope, experiments, quick
from research.store import ResultStore
from research.tasks import CalibrationPoint, ExpertCounts, OneRequest, Replicas, Task

SCOPE = replace(quick(Scope()), seeds=3)
SLOWDOWN = {"vllm": 1.0, "gimbal": 0.8, "gimbal+": 0.7, "gimbal_dp": 0.95, "multihost_gimbal": 0.45}
"""Factor on the latencies of each system; all other systems have 0.9."""


def made_up_store(folder: Path, names: tuple[str, ...] | None = None, scope: Scope = SCOPE) -> ResultStore:
    """Return a store with results of all experiments in this scope, or of the named ones only."""
    store = ResultStore(folder / "results.jsonl")
    found = experiments(scope)
    for task in dict.fromkeys(task for name in names or found for task in found[name].tasks):
        store.add(task, made_up(task))
    return store


def made_up(task: Task) -> dict[str, Any]:
    """Return a result with a latency of 10 s times load times slowdown. The other measures follow from it."""
    match task:
        case Scenario():
            return {**_run(task), "wall_s": 2.0}
        case OneRequest(tokens):
            clients = {"requests": 1, "ttft_mean_s": tokens / 1e5, "tpot_mean_s": 0.007}
            return {"clients": clients, "kv_mib": tokens / 10, "wall_s": 1.0}
        case ExpertCounts():
            counts_LSE = np.random.default_rng(0).integers(1, 100, size=(3, 2, 8))
            return {"counts_LSE": counts_LSE.tolist(), "ranks": 4, "wall_s": 1.0}
        case Replicas():
            seconds = {"contiguous": 2.0, "eplb, 0 redundant": 1.9, "even": 1.6}
            experts_s = {name: {"prefill": s, "decode": 2 * s} for name, s in seconds.items()}
            return {"experts_s": experts_s, "steps_s": {"prefill": 4.0, "decode": 8.0}, "steps": {}, "wall_s": 1.0}
        case CalibrationPoint(beta, gamma):
            row = {"same": 0.9, "comm_gap": beta / 100, "moved": gamma / 10, "fullest": 1.1}
            return {"gimbal": row, "exact": row, "wall_s": 1.0}
    raise AssertionError(task)


def _run(scenario: Scenario) -> dict[str, Any]:
    e2e = 10 * load_of(scenario) * SLOWDOWN.get(scenario.system, 0.9)
    return {
        "clients": {
            "requests": scenario.workload.requests,
            "e2e_mean_s": e2e,
            "ttft_mean_s": e2e / 10,
            "ttft_p99_s": e2e / 5,
            "tpot_mean_s": e2e / 100,
        },
        "requests_per_s": load_of(scenario),
        "running": 20 * e2e,
        "kv_use": 0.01 * e2e,
        "prompt_gap_tokens_per_s": 100 * e2e,
        "imbalance": 1.2,
        "remote_share": 0.5,
        "far_share": 0.25,
        "far_bytes_per_token": 1e6,
        "seconds_by_part": {"attention": 1.0, "exchange": 3.0},
        "steps": 1000,
        "experts_moved": 12,
        "outside": {"experts": 500},
    }
