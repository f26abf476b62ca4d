"""Scenarios: one record in, one record out, and rates as shares of the sustained rate."""

import json
from dataclasses import replace

import numpy as np
import pytest

from gimbal_jax.bench.measurement import Measurement
from gimbal_jax.config import GPU_ENGINE, MeshConfig
from gimbal_jax.planning.hardware import gpu_kinds
from gimbal_jax.planning.plan import MeshPlan, PlanRequest, plan_mesh
from gimbal_jax.scheduler.counts_file import save_counts
from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.simulation.routing import BALANCED, RoutingConfig
from gimbal_jax.simulation.scenario import (
    KV_TOKENS,
    MODEL,
    PAPER_MESH,
    Scenario,
    capacity,
    run_scenario,
    scenario_router,
    simulate_scenario,
    sustained_rate,
    with_rate,
)
from gimbal_jax.simulation.scenario import testbed as make_testbed
from gimbal_jax.simulation.workload import WorkloadConfig

SMALL = Scenario(workload=WorkloadConfig("azure-code", requests=40, rate=30.0), routing=BALANCED, max_rows=64)


def test_a_scenario_and_its_results_are_json():
    done: list[Measurement] = []
    record = run_scenario(SMALL, done.append)
    assert len(done) == record["clients"]["requests"] == 40
    assert json.loads(json.dumps(record, allow_nan=False)) == json.loads(json.dumps(record))
    assert record["rate"] == 30.0
    assert record["scenario"]["workload"]["lengths"] == "azure-code"
    assert record["clients"]["ttft_mean_s"] > 0 and record["requests_per_s"] > 0
    assert sum(record["seconds_by_part"].values()) <= record["seconds"] * (1 + 1e-9)


def test_the_same_scenario_gives_the_same_record():
    assert run_scenario(SMALL) == run_scenario(SMALL)
    assert run_scenario(replace(SMALL, seed=1)) != run_scenario(SMALL)


def test_unmeasured_values_are_none():
    """The run ends before the first period of prompt throughput."""
    record = run_scenario(replace(SMALL, workload=WorkloadConfig("azure-code", requests=1)))
    assert record["seconds"] < 10 and record["prompt_gap_tokens_per_s"] is None
    json.dumps(record, allow_nan=False)


def test_a_run_uses_the_system_s_policies():
    for name in ("vllm", "gimbal+", "sem_moe", "moetuner"):
        run = simulate_scenario(replace(SMALL, system=name))
        assert len(run.requests) == 40 and not run.clients.failed
    static_LE = static_placement(len(MODEL.moe_layers), MODEL.num_experts, 4)
    assert not np.array_equal(run.slot_of_expert_LE, static_LE)  # moetuner's, from the start
    assert run.experts_moved == 0


def test_rates_are_shares_of_the_rate_that_vllm_sustains():
    scenario = replace(SMALL, system="late_static", share_of_capacity=0.5, max_rows=8, token_budget=512)
    sustained = capacity(replace(scenario, system="vllm"))
    assert with_rate(scenario).workload.rate == pytest.approx(0.5 * sustained)
    assert with_rate(scenario).share_of_capacity is None
    assert with_rate(SMALL) is SMALL


def test_more_rows_sustain_more():
    narrow, wide = (
        capacity(
            replace(SMALL, system="static", workload=WorkloadConfig("burstgpt", 20), max_rows=rows, token_budget=512)
        )
        for rows in (2, 8)
    )
    assert wide > 1.5 * narrow


def test_above_the_sustained_rate_requests_pile_up_and_below_they_do_not():
    base = replace(SMALL, system="static", max_rows=8, token_budget=512)
    sustained = capacity(base)

    def last_waits(share: float) -> float:
        workload = replace(base.workload, requests=200, rate=share * sustained)
        run = simulate_scenario(replace(base, workload=workload))
        return float(np.mean([m.ttft_s for m in run.requests[150:]]))

    assert last_waits(1.5) > 5 * last_waits(0.7)


def test_sustained_rate_of_a_steady_run():
    """Two rows, each with one request of 1 s after another, sustain two requests a second for any lengths."""
    steady = [Measurement(0.0, 99, 101, ttft_s=0.0 + n // 2, e2e_s=1.0 + n // 2) for n in range(400)]
    assert sustained_rate(steady) == pytest.approx(2.0, rel=0.01)
    # Half of the work of the long ones is a long one's.
    mixed = [Measurement(0.0, 10 + 80 * (n % 2), 10, 0.5 * n, 0.5 * n + 0.4) for n in range(400)]
    assert sustained_rate(mixed) == pytest.approx(2.0, rel=0.02)


def test_the_kv_cache_has_the_planner_s_size():
    plan = plan_mesh(PlanRequest(MODEL, gpu_kinds()["H100"], 4), PAPER_MESH)
    assert isinstance(plan, MeshPlan) and plan.kv_tokens == KV_TOKENS
    assert make_testbed(Scenario()).engine.num_pages * GPU_ENGINE.page_size == KV_TOKENS


def test_another_model_is_served_with_its_own_shapes_over_several_nodes():
    scenario = replace(SMALL, model="Qwen3-235B-A22B", mesh=MeshConfig(4, 4, nodes=2), system="static")
    record = run_scenario(replace(scenario, workload=WorkloadConfig("azure-code", requests=8, rate=30.0)))
    assert make_testbed(scenario).model.num_layers == 94
    assert not record["clients"]["failed"] and record["outside"]["experts"] == 94 * 16 * record["steps"]
    # Of balanced traffic half leaves its node; there is a copy for each of at most 8 ranks, there and back.
    assert record["far_share"] == pytest.approx(0.5, abs=0.02)
    assert 0 < record["far_bytes_per_token"] < 94 * 8 * (2 * 2 * 4096 + 64)
    assert run_scenario(SMALL)["far_bytes"] == 0.0
    with pytest.raises(ValueError, match="model must be one of Qwen3-30B-A3B, "):
        replace(SMALL, model="Qwen3-1B")


def test_routing_follows_a_counts_file(tmp_path):
    layers, experts = len(MODEL.moe_layers), MODEL.num_experts
    counts_LSE = np.zeros((layers, 2, experts), int)
    counts_LSE[:, 0, :16] = counts_LSE[:, 1, -16:] = 10
    path = tmp_path / "counts.npz"
    save_counts(path, counts_LSE, static_placement(layers, experts, 4), {"ranks": 4})
    run = simulate_scenario(replace(SMALL, system="static", recording=str(path)))
    assert run.counts_LSE[:, 0, 16:].sum() == run.counts_LSE[:, 1, :-16].sum() == 0
    assert run.remote_share == 0  # each source's experts are at home where they start
    with pytest.raises(ValueError, match=r"must be of 48 layers, 4 sources \(DP\) and 128 experts, not 48 layers, 2"):
        scenario_router(replace(SMALL, mesh=MeshConfig(4, 1), recording=str(path)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"system": "tgi"}, "system must be one of vllm, .*, not tgi"),
        ({"share_of_capacity": 0.0}, "share_of_capacity must be above 0 and finite, not 0.0"),
        ({"routing": RoutingConfig(persistence=1.5)}, "persistence must be from 0 to 1, not 1.5"),
        ({"routing": RoutingConfig(trend=-0.5)}, "trend must be from 0 to 1, not -0.5"),
        ({"routing": RoutingConfig(trend_s=0.0)}, "trend_s must be above 0, not 0.0"),
        ({"routing": RoutingConfig(topics=0)}, "topics must be at least 1, not 0"),
        ({"kv_tokens": 63}, "kv_tokens must be at least a page of 64, not 63"),
        ({"seed": -1}, "seed must be at least 0, not -1"),
    ],
)
def test_an_invalid_scenario_is_rejected(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)
