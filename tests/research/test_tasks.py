"""Tasks of the reproduction that are not runs."""

import json
from dataclasses import replace

import numpy as np
import pytest

from gimbal_jax.simulation.scenario import Scenario, simulate_scenario
from gimbal_jax.simulation.workload import WorkloadConfig
from research.tasks import CalibrationPoint, Capacity, ExpertCounts, OneRequest, run_task, scenario_of
from research.traffic_shape import traffic_shape

SMALL = Scenario("static", workload=WorkloadConfig("azure-code", requests=10, rate=40.0))


def test_single_requests_take_the_paper_s_memory_and_long_prompts_more_time():
    short, long = (run_task(OneRequest(tokens, "graph")) for tokens in (200, 2000))
    assert (short["kv_mib"], long["kv_mib"]) == (18.75, 187.5)  # the paper's figure 2
    assert short["clients"]["ttft_mean_s"] < long["clients"]["ttft_mean_s"]
    assert short["clients"]["tpot_mean_s"] < long["clients"]["tpot_mean_s"] < 2 * short["clients"]["tpot_mean_s"]


def test_counts_include_all_expert_tokens_of_a_run():
    found = json.loads(json.dumps(run_task(ExpertCounts(SMALL))))
    run = simulate_scenario(SMALL)
    assert np.array(found["counts_LSE"]).sum() == run.tokens_computed * 48 * 8
    shape = traffic_shape(found)
    assert shape.relative_LE.mean(axis=1) == pytest.approx(np.ones(48))
    sent_LS = run.counts_LSE.sum(axis=2)
    assert np.average(shape.remote_LS, weights=sent_LS) == pytest.approx(shape.remote_share)
    assert shape.remote_share == pytest.approx(run.remote_share)


def test_remote_shares_by_layer_and_source():
    """Two ranks of a source hold four experts, and source 1 sends all its tokens to source 0's ranks."""
    counts_LSE = np.array([[[3, 1, 0, 0, 4, 0, 0, 0], [2, 2, 2, 2, 0, 0, 0, 0]]])
    shape = traffic_shape({"counts_LSE": counts_LSE.tolist(), "ranks": 4})
    assert shape.remote_LS.tolist() == [[0.5, 1.0]]
    assert shape.remote_share == 0.75
    assert shape.imbalance_L.tolist() == [2.0]
    assert shape.relative_LE[0, 0] == 2.5


def test_a_scenario_task_gives_the_run_s_record():
    assert run_task(SMALL)["clients"]["requests"] == 10
    assert scenario_of(SMALL) == scenario_of(ExpertCounts(SMALL)) == SMALL
    assert scenario_of(Capacity(SMALL)) is None


def test_capacity_is_a_rate_that_the_reference_sustains():
    small = replace(SMALL, system="vllm", max_rows=4, workload=WorkloadConfig("azure-code", requests=10))
    assert 1 < run_task(Capacity(small))["requests_per_s"] < 100


def test_a_calibration_point_is_rejected():
    with pytest.raises(ValueError, match=r"Use research\.reproduce\.compute"):
        run_task(CalibrationPoint(0.1, 0.1, 2))
