"""Changes between systems, their intervals, verdicts, and the paper's claims."""

import math
from dataclasses import replace

import numpy as np
import pytest

from gimbal_jax.simulation.scenario import Scenario
from gimbal_jax.simulation.systems import SYSTEMS
from gimbal_jax.simulation.workload import WorkloadConfig
from research.claims import CLAIMS, Claim, measured, worded
from research.comparison import (
    Estimate,
    at_load,
    changes,
    estimate,
    load_of,
    under_system,
    value,
    verdict,
)
from research.store import ResultStore


def record(tpot_s: float | None) -> dict[str, object]:
    return {"clients": {"tpot_mean_s": tpot_s}}


def grid(rates=(2.0, 4.0), seeds=2) -> list[Scenario]:
    return [Scenario("vllm", workload=WorkloadConfig(rate=rate), seed=seed) for rate in rates for seed in range(seeds)]


def test_the_interval_is_of_the_mean():
    values = np.random.default_rng(1).normal(3.0, 2.0, size=400)
    found = estimate(values.tolist())
    assert found.mean == pytest.approx(values.mean()) and found.count == 400
    half = 1.96 * values.std() / 20
    assert found.high - found.mean == pytest.approx(half, rel=0.1)
    assert found.mean - found.low == pytest.approx(half, rel=0.1)
    assert estimate(values.tolist()) == found
    assert estimate([0.5, 0.5]) == Estimate(0.5, 0.5, 0.5, 2)
    assert estimate([]).count == 0 and math.isnan(estimate([]).mean)


def test_intervals_contain_the_true_mean_at_about_their_nominal_rate():
    rng = np.random.default_rng(2)
    found = [estimate(rng.normal(size=30).tolist()) for _ in range(300)]
    assert 0.88 < np.mean([e.low <= 0 <= e.high for e in found]) < 0.98


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.40, -0.20, "confirmed"),
        (-0.60, -0.50, "confirmed"),  # more than the paper
        (-0.40, -0.19, "weaker"),
        (-0.02, -0.01, "weaker"),
        (-0.40, 0.01, "not seen"),
        (0.0, 0.0, "not seen"),
        (0.01, 0.40, "contrary"),
    ],
)
def test_verdicts_on_a_fall_of_two_fifths(low, high, expected):
    assert verdict(-0.4, Estimate((low + high) / 2, low, high, 9)) == expected
    assert verdict(0.4, Estimate(-(low + high) / 2, -high, -low, 9)) == expected  # a rise, mirrored


def test_two_runs_are_too_few_for_a_verdict():
    assert verdict(-0.4, estimate([])) == verdict(-0.4, estimate([-0.5, -0.5])) == "too few runs"
    assert verdict(-0.4, estimate([-0.5] * 3)) == "confirmed"


def test_each_run_is_compared_with_its_own_baseline(tmp_path):
    store = ResultStore(tmp_path / "results.jsonl")
    before = grid()
    after = under_system("gimbal", before)
    for number, (a, b) in enumerate(zip(before, after, strict=True)):
        store.add(a, record(1.0 + number))
        store.add(b, record((1.0 + number) * (0.9 if number % 2 else 0.5)))
    assert changes(store, after, before, "tpot") == pytest.approx([-0.5, -0.1, -0.5, -0.1])
    assert changes(store, before, before, "tpot") == [0.0] * 4


def test_pairs_without_a_number_are_ignored(tmp_path):
    store = ResultStore(tmp_path / "results.jsonl")
    before = grid()
    after = under_system("gimbal", before)
    for scenario, tpot in [(before[0], 2.0), (after[0], 1.0), (before[1], 2.0), (after[2], 1.0), (before[3], None)]:
        store.add(scenario, record(tpot))
    assert changes(store, after, before, "tpot") == [-0.5]
    assert math.isnan(value(store, before[3], "tpot")) and math.isnan(value(store, before[2], "tpot"))


def test_loads_are_rates_or_shares():
    found = grid(rates=(2.0, 3.0, 4.0))
    assert {load_of(s) for s in at_load("lowest", found)} == {2.0}
    assert {load_of(s) for s in at_load("highest", found)} == {4.0}
    assert {load_of(s) for s in at_load(3.0, found)} == {3.0}
    assert at_load("all", found) == found and at_load(2.5, found) == [] and at_load("highest", []) == []
    assert load_of(replace(found[0], share_of_capacity=0.5)) == 0.5


def test_a_claim_is_measured_at_its_load_and_shape(tmp_path):
    """Gimbal saves a tenth, but half at the highest load of one shape."""
    store = ResultStore(tmp_path / "results.jsonl")
    shapes = [
        replace(s, workload=replace(s.workload, lengths=shape)) for shape in ("random", "average") for s in grid()
    ]
    for scenario in shapes:
        special = scenario.workload.rate == 4.0 and scenario.workload.lengths == "average"
        store.add(scenario, record(1.0))
        store.add(replace(scenario, system="gimbal"), record(0.5 if special else 0.9))
    claim = Claim("7.3", "tpot", -0.384, load="highest", shape="average")
    assert measured(claim, store, shapes).mean == pytest.approx(-0.5)
    assert measured(replace(claim, shape=None), store, shapes).mean == pytest.approx(-0.3)
    assert measured(replace(claim, load="lowest"), store, shapes).mean == pytest.approx(-0.1)
    assert measured(replace(claim, load=3.0), store, shapes).count == 0
    assert worded(claim) == "tpot: gimbal against vllm, highest load, average"


def test_claims_name_systems_that_exist_and_are_all_different():
    assert all(claim.system in SYSTEMS and claim.baseline in SYSTEMS for claim in CLAIMS)
    assert len(set(CLAIMS)) == len(CLAIMS) == len({(worded(c), c.section) for c in CLAIMS})
    assert all((claim.paper > 0) == (claim.measure == "throughput") for claim in CLAIMS)
