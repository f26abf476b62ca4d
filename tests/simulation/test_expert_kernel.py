"""Expert products: a fit to balanced loads predicts uneven ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.simulation.expert_kernel import TABLED_PAIRS, fit_expert_kernel
from research.prediction import expert_errors

KERNEL = fit_expert_kernel()
LOADS = st.lists(st.integers(0, 3000), min_size=32, max_size=32)


def test_measured_layers_are_predicted():
    errors = {kind: np.abs(e) for kind, e in expert_errors(KERNEL, np.random.default_rng(0)).items()}
    median = {kind: float(np.median(e)) for kind, e in errors.items()}
    assert sum(len(e) for e in errors.values()) == 324
    assert median["experts, balanced: fitted"] < 0.02
    assert median["experts, balanced: ep 1, not fitted"] < 0.04
    assert median["experts, power law, at least 16 tokens: never seen"] < 0.03
    assert np.quantile(errors["experts, power law, at least 16 tokens: never seen"], 0.95) < 0.09


@given(LOADS, st.integers(0, 31), st.integers(1, 500), st.integers(1, 20000))
def test_more_pairs_never_cost_less(load, expert, more, tokens):
    fuller = np.array(load)
    fuller[expert] += more
    before, after = KERNEL.seconds(np.stack([load, fuller]), np.full(2, tokens))
    assert after >= before * (1 - 1e-12)


@given(LOADS, st.integers(0, 20000), st.integers(1, 20000))
def test_more_tokens_on_the_rank_never_cost_less(load, tokens, more):
    fewer, greater = KERNEL.seconds(np.array([load, load]), np.array([tokens, tokens + more]))
    assert greater >= fewer


def test_one_expert_with_all_pairs_is_faster_than_many_if_reading_weights_dominates():
    even, one = np.full(32, 4), np.zeros(32, np.int64)
    one[0] = 128
    spread, packed = KERNEL.seconds(np.stack([even, one]), np.full(2, 64))
    assert packed < 0.5 * spread


def test_a_rank_without_pairs_computes_nothing():
    assert KERNEL.seconds(np.zeros((1, 32), np.int64), np.array([100])) == [0.0]
    assert KERNEL.products(np.array([0, 1])).tolist() == [0.0, 0.0]


def test_the_table_of_whole_pairs_equals_the_curve_and_continues_it():
    pairs = np.array([1, 2, 700, 1024, TABLED_PAIRS, 2 * TABLED_PAIRS])
    np.testing.assert_allclose(KERNEL.products(pairs), KERNEL.product.at(pairs))


@pytest.mark.parametrize(("pairs", "tokens", "count"), [(1024, 16384, 0), (1025, 16384, 1), (1024, 16385, 1)])
def test_prices_beyond_the_measurements_are_counted(pairs, tokens, count):
    load_P = np.full(32, 3)
    load_P[5] = pairs
    assert KERNEL.outside(load_P[None], np.array([tokens])) == count
