"""Systems: documented differences, and schedules of decisions."""

from dataclasses import asdict, replace

import pytest

from gimbal_jax.simulation.simulate import simulate
from gimbal_jax.simulation.systems import SYSTEMS
from gimbal_jax.simulation.workload import Arrival
from tests.simulation.rig import ROUTER, TESTBED, FlatCosts

COMPARED = {
    *("vllm", "vllm_0_33", "sglang", "moetuner", "sem_moe", "gimbal_dp", "gimbal_ep", "gimbal_no_collab", "gimbal"),
    *("gimbal_uncalibrated", "gimbal+", "static", "round_robin", "gimbal_static", "late_static"),
}


def differing(one: str, other: str) -> set[str]:
    """Return the parts in which two systems differ, apart from their names."""
    a, b = asdict(SYSTEMS[one]), asdict(SYSTEMS[other])
    return {part for part in a if a[part] != b[part]} - {"name", "summary"}


def test_all_systems_have_their_names():
    assert set(SYSTEMS) >= COMPARED
    assert all(name == system.name and system.summary for name, system in SYSTEMS.items())


@pytest.mark.parametrize(
    ("one", "other", "parts"),
    [
        ("vllm", "gimbal_dp", {"dispatch", "queue"}),
        ("vllm", "gimbal_ep", {"placement"}),
        ("gimbal_dp", "gimbal_no_collab", {"placement"}),
        ("gimbal_no_collab", "gimbal", {"dispatch"}),
        ("gimbal", "gimbal_uncalibrated", {"placement"}),
        ("vllm", "vllm_0_33", {"dispatch", "migration"}),
        ("static", "round_robin", {"dispatch"}),
        ("gimbal_static", "late_static", {"dispatch"}),
        ("moetuner", "sem_moe", {"offline"}),
        ("static", "moetuner", {"offline"}),
        ("multihost_static", "multihost_gimbal", {"placement"}),
        ("multihost_eplb", "multihost_eplb_hierarchical", {"placement"}),
    ],
)
def test_two_systems_differ_in_one_thing(one, other, parts):
    assert differing(one, other) == parts


def test_collaboration_is_the_weight_of_pressure_alone():
    with_it, without = SYSTEMS["gimbal"].dispatch, SYSTEMS["gimbal_no_collab"].dispatch
    assert with_it.lambda_moe > 0 == without.lambda_moe
    assert replace(with_it, lambda_moe=0.0) == without


def test_constants_are_the_paper_s():
    gimbal = SYSTEMS["gimbal"]
    assert gimbal.dispatch.close_scores * 8192 == pytest.approx(3000, rel=0.02)
    assert (gimbal.dispatch.high_kv, gimbal.dispatch.kv_gap, gimbal.queue.aging_s) == (0.9, 0.1, 5.0)
    weights = gimbal.placement
    assert (weights.alpha, weights.beta, weights.gamma) == (1.0, 0.2, 0.1)


def test_vllm_decides_after_750_steps_and_every_3000():
    """The requests run one after another, for 4,000 steps."""
    arrivals = [Arrival(time_s=float(n), input_tokens=8, output_tokens=390, topic=n % 3) for n in range(11)]
    run = simulate(SYSTEMS["vllm"], TESTBED, FlatCosts(step_s=0.001, pair_s=0.0), ROUTER, arrivals, seed=0)
    assert run.steps > 3800
    assert [record.step for record in run.placements] == pytest.approx([750, 3750], abs=3)
    assert run.experts_moved > 0
