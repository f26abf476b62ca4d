"""Metrics of the placement loop against the functions and records behind them."""

from dataclasses import replace

import numpy as np
import pytest

from gimbal_jax.scheduler.traffic import balancedness_sglang, balancedness_vllm, far_share, imbalance_L, remote_share
from gimbal_jax.serving.monitoring.placement_metrics import loop_metrics, traffic_metrics
from gimbal_jax.serving.placement.records import PlacementTotals
from tests.serving.fake_server import CONFIG, MODEL, FakeCore
from tests.serving.scrapes import busy_scrapes

STATUS = FakeCore().status().placement
RANKS = 4


def values(families):
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def traffic(status=STATUS, model=MODEL):
    return values(traffic_metrics(model, CONFIG.mesh, status))


def test_traffic_of_the_last_window():
    sparse = replace(MODEL, num_layers=9, moe_layers=(3, 7))
    counts_LSE = STATUS.window_counts_LSE.copy()
    counts_LSE[1, :, 0] += 50
    status = replace(STATUS, window_counts_LSE=counts_LSE)
    of = counts_LSE, status.slot_of_expert_LE, RANKS
    by_layer = imbalance_L(*of)
    found = traffic(status, sparse)
    assert [found["gimbal_layer_imbalance", layer] for layer in "37"] == by_layer.tolist()
    assert found["gimbal_rank_imbalance",] == pytest.approx(by_layer.mean())
    assert (found["gimbal_worst_layer",], found["gimbal_worst_layer_imbalance",]) == (7, by_layer[1])
    assert found["gimbal_balancedness", "vllm"] == balancedness_vllm(*of)
    assert found["gimbal_balancedness", "sglang"] == balancedness_sglang(*of)
    assert found["gimbal_remote_share",] == remote_share(*of)
    assert found["gimbal_far_share",] == 0  # one node
    two = replace(CONFIG.mesh, nodes=2)
    found = values(traffic_metrics(sparse, two, status))
    assert found["gimbal_far_share",] == far_share(counts_LSE, status.slot_of_expert_LE, two) > 0


def test_layers_without_traffic_are_even():
    found = traffic(replace(STATUS, window_counts_LSE=np.zeros_like(STATUS.window_counts_LSE)))
    assert found["gimbal_rank_imbalance",] == found["gimbal_layer_imbalance", "0"] == 1
    assert not any(np.isnan(value) for value in found.values())


def test_decisions_are_counted_by_outcome():
    totals = PlacementTotals(5, 4, 3, 2, 1.5, 0.5, 3, 4096, predicted_gain=0.2, achieved_gain=-0.1)
    found = values(loop_metrics(replace(STATUS, totals=totals), now=10.0, start=0.0))
    decisions = {key[1]: value for key, value in found.items() if key[0] == "gimbal_placement_decisions_total"}
    assert decisions == {"kept": 5, "applied": 4, "decision_failed": 3, "migration_failed": 2}
    assert found["gimbal_placement_decision_seconds_total",] == 1.5
    assert found["gimbal_migration_seconds_total",] == 0.5
    assert found["gimbal_placement_predicted_gain",] == 0.2
    assert found["gimbal_placement_achieved_gain",] == -0.1
    assert found["gimbal_experts_moved_total",] == 3
    assert found["gimbal_moved_bytes_total",] == 4096
    assert found["gimbal_windows_written_total",] == 5
    assert found["gimbal_windows_lost_total",] == 2


def test_unknown_gain_has_no_sample():
    found = values(loop_metrics(replace(STATUS, totals=PlacementTotals()), 10.0, 0.0))
    assert not any("gain" in key[0] for key in found)


@pytest.mark.parametrize(("last", "age"), [(None, 100.0), (70.0, 30.0)])
def test_ages_run_from_start_until_the_first_event(last, age):
    found = values(loop_metrics(replace(STATUS, totals=PlacementTotals(last_rebalance=last)), now=100.0, start=0.0))
    assert found["gimbal_last_rebalance_age_seconds",] == age
    assert found["gimbal_last_placement_decision_age_seconds",] == 99.0
    found = values(loop_metrics(replace(STATUS, records=()), now=100.0, start=20.0))
    assert found["gimbal_last_placement_decision_age_seconds",] == 80.0


def test_metrics_of_a_real_migration():
    server, found = busy_scrapes()
    applied = [record for record in server.server.rebalancer.records if record.outcome == "applied"]
    assert len(applied) == found["gimbal_placement_decisions_total", "applied"] == 1
    assert found["gimbal_experts_moved_total",] == applied[0].experts_moved
    predicted = 1 - applied[0].cost_after / applied[0].cost_before
    assert found["gimbal_placement_predicted_gain",] == pytest.approx(predicted)
    # Every window of this server has the same traffic.
    assert found["gimbal_placement_achieved_gain",] == pytest.approx(predicted)
    moved = sum(len(moves.src_slot) for _, moves in server.runner.migrated)
    assert found["gimbal_moved_bytes_total",] == moved * server.runner.expert_bytes
