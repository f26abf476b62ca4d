"""research/ablation_cpu.py without its long runs."""

import numpy as np
import pytest

from gimbal_jax.simulation.systems import SYSTEMS
from research.ablation_cpu import ABLATION, LOADS, AtOnce, compared, draw, plan_runs, server_config
from research.store import ResultStore

RUNS = plan_runs(LOADS, seeds=2, seconds=5.0, capacity=10.0)


def result(ttft: float, tpot: float) -> dict:
    return {"clients": {"ttft_mean_s": ttft, "tpot_mean_s": tpot}}


def test_systems_take_turns_within_a_load_and_seed():
    groups = [RUNS[first : first + len(ABLATION)] for first in range(0, len(RUNS), len(ABLATION))]
    for group in groups:
        assert {run.system for run in group} == set(ABLATION)
        assert len({(run.load, run.seed, run.requests_per_s) for run in group}) == 1
    assert len({(group[0].load, group[0].seed) for group in groups}) == len(groups) == 2 * len(LOADS)
    assert {group[0].system for group in groups} == set(ABLATION)
    assert {run.requests_per_s for run in RUNS} == {10 * load for load in LOADS}


def test_systems_are_compared_on_the_same_requests(tmp_path):
    store, rng = ResultStore(tmp_path / "runs.jsonl"), np.random.default_rng(0)
    difficulty = {(run.load, run.seed): rng.uniform(1, 100) for run in RUNS}
    for run in RUNS:
        share = 0.5 if run.system == "gimbal" else 1.0
        hard = difficulty[run.load, run.seed]
        store.add(run, result(share * hard, 0.8 * hard if share < 1 else hard))
    ttft, tpot = compared(store, RUNS, "gimbal")
    # Loads and seeds differ a hundredfold: unpaired, the intervals would be wide.
    assert (ttft.mean, ttft.low, ttft.high) == pytest.approx((0.5, 0.5, 0.5))
    assert (tpot.mean, tpot.low, tpot.high) == pytest.approx((0.8, 0.8, 0.8))
    draw({system: compared(store, RUNS, system) for system in ABLATION}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_a_system_that_stops_the_engines_moves_all_experts_together():
    blocking = server_config(SYSTEMS["vllm"], 100).placement
    between = server_config(SYSTEMS["gimbal+"], 100).placement
    assert blocking.migrate_bytes_per_tick > 2**60 > between.migrate_bytes_per_tick
    assert blocking.window_steps == between.window_steps == 100


def test_decisions_are_made_in_submit_and_errors_kept():
    asked: list[int] = []
    future = AtOnce().submit(asked.append, 3)
    assert asked == [3] and future.done()
    with pytest.raises(ZeroDivisionError):
        AtOnce().submit(lambda: 1 / 0).result()
