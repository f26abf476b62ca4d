"""Costs fitted to measured steps."""

import numpy as np
import pytest

from gimbal_jax.scheduler.migration import Round
from gimbal_jax.simulation.work import EngineWork
from research.measured_costs import LEAST_STEPS, MeasuredCosts, MeasuredStep

TILE = 8
BUCKETS = ((4, 0), (16, 0), (4, 2), (16, 4))
TRUE = {
    (4, 0): (1e-3, 1e-4, 0.0, 1e-6),
    (16, 0): (2e-3, 5e-5, 0.0, 2e-6),
    (4, 2): (4e-3, 1e-4, 3e-5, 1e-6),
    (16, 4): (6e-3, 5e-5, 2e-5, 3e-6),
}
HOST = (2e-4, 1e-5)


def engine(contexts: list[int], prefill: list[tuple[int, int]]) -> EngineWork:
    return EngineWork(np.array(contexts, np.int64), tuple(prefill), len(contexts))


def draw_engine(rng, bucket) -> EngineWork:
    rows, tiles = bucket
    contexts = rng.integers(1, 100, rng.integers(0, rows + 1)).tolist()
    prefill = [(int(rng.integers(50)), int(rng.integers(1, TILE + 1))) for _ in range(rng.integers(0, tiles + 1))]
    return engine(contexts, prefill)


def true_seconds(engines, bucket) -> float:
    contexts = [int(c) for e in engines for c in e.decode_contexts] + [
        sum(chunk) for e in engines for chunk in e.prefill
    ]
    rows = sum(len(e.decode_contexts) for e in engines)
    prefill = sum(count for e in engines for _, count in e.prefill)
    base, by_row, by_token, by_context = TRUE[bucket]
    return base + by_row * rows + by_token * prefill + by_context * max(contexts, default=0)


def smallest_bucket(engines):
    rows = max(len(e.decode_contexts) for e in engines)
    tiles = max(len(e.prefill) for e in engines)  # every chunk drawn here fits in one tile
    return next(b for b in BUCKETS if b[0] >= rows and b[1] >= tiles)


def draw_steps(buckets=BUCKETS, count=400, seed=0) -> list[MeasuredStep]:
    rng, steps = np.random.default_rng(seed), []
    for wanted in buckets:
        for _ in range(count):
            engines = (draw_engine(rng, wanted), draw_engine(rng, wanted))
            if not any(e.tokens for e in engines) or (bucket := smallest_bucket(engines)) not in buckets:
                continue
            host = HOST[0] + HOST[1] * sum(e.chosen for e in engines)
            steps.append(MeasuredStep(engines, true_seconds(engines, bucket), host))
    return steps


def test_known_costs_are_recovered_exactly():
    costs = MeasuredCosts(draw_steps(), BUCKETS, TILE)
    for step in draw_steps(count=20, seed=1):
        price = costs.price(step.engines_S)
        assert price == pytest.approx({"step": step.seconds, "host": step.host_s})


def test_an_unmeasured_bucket_is_priced_as_the_next_larger_one():
    steps = draw_steps(buckets=((4, 0), (16, 4)))
    costs = MeasuredCosts(steps, BUCKETS, TILE)
    engines = engine([9] * 10, []), engine([], [])
    assert costs.price(engines)["step"] == pytest.approx(true_seconds(engines, (16, 4)))
    assert costs.outside == {"step": 1}


def test_steps_within_the_measured_range_do_not_count_as_outside():
    steps = draw_steps()
    costs = MeasuredCosts(steps, BUCKETS, TILE)
    for step in steps:
        costs.price(step.engines_S)
    assert not costs.outside
    costs.price((engine([10_000], []), engine([], [])))
    assert costs.outside == {"step": 1}


def test_the_largest_bucket_must_be_measured():
    with pytest.raises(ValueError, match=rf"bucket \(16, 4\) needs {LEAST_STEPS}"):
        MeasuredCosts(draw_steps(buckets=BUCKETS[:3]), BUCKETS, TILE)


def test_prices_are_not_negative_if_more_work_took_less_time():
    steps = [MeasuredStep((engine([9] * rows, []),), 0.010 - 0.001 * rows, 0.0) for rows in (1, 2, 3, 4) * LEAST_STEPS]
    costs = MeasuredCosts(steps, ((4, 0),), TILE)
    prices = [costs.price((engine([9] * rows, []),))["step"] for rows in (1, 2, 3, 4)]
    assert prices == pytest.approx([0.0075] * 4)


def test_placement_costs_are_as_measured():
    costs = MeasuredCosts(draw_steps(), BUCKETS, TILE, round_s=0.5, decision_s=0.25)
    moves = Round(np.array([0]), np.array([1]), np.array([1, 0]))
    assert (costs.migration_seconds(moves, False), costs.migration_seconds(moves, True)) == (0.5, 0.0)
    assert costs.decision_seconds("gimbal") == 0.25
