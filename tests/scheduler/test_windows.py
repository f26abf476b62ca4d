"""The generator's statistics are near those that were measured of Qwen3-30B-A3B's router (128 experts, top-8)."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.scheduler.traffic import imbalance_L
from gimbal_jax.scheduler.windows import WindowConfig, synthetic_windows

QWEN = WindowConfig(layers=24, sources=1, requests=30, tokens_per_request=100)
"""Half of its layers, to be quick: layers are drawn alike."""
SMALL = WindowConfig(layers=3, experts=16, experts_per_token=2, topics=4, requests=5, tokens_per_request=8)


def shares_LE(config: WindowConfig) -> np.ndarray:
    counts_LE = next(synthetic_windows(config, np.random.default_rng(0))).counts_LSE.sum(axis=1)
    return np.sort(counts_LE, axis=1)[:, ::-1] / counts_LE.sum(axis=1, keepdims=True)


def statistics(config: WindowConfig) -> tuple[float, float, float]:
    """(experts that cover 90 % of the load, 1 - normalised entropy, hottest over mean), means over layers."""
    share_LE = shares_LE(config)
    covering = ((np.cumsum(share_LE, axis=1) < 0.9).sum(axis=1) + 1).mean()
    entropy = -(share_LE * np.log(np.maximum(share_LE, 1e-12))).sum(axis=1).mean()
    return covering, 1 - entropy / np.log(config.experts), share_LE[:, 0].mean() * config.experts


def test_rank_loads_of_diverse_text_match_measurements():
    covering, lost_entropy, hottest = statistics(replace(QWEN, topics=4))  # measured: 65, 0.111, 5.5
    assert 60 < covering < 80
    assert 0.08 < lost_entropy < 0.13
    assert 5 < hottest < 8.5


def test_rank_loads_of_narrow_text_match_measurements():
    covering, lost_entropy, hottest = statistics(replace(QWEN, topics=1))  # measured: 58, 0.154, 8.1
    assert 54 < covering < 66
    assert 0.13 < lost_entropy < 0.18
    assert 7 < hottest < 12


def test_imbalance_of_one_domain_under_the_contiguous_placement():
    counts_LSE = next(synthetic_windows(replace(QWEN, topics=1, layers=48), np.random.default_rng(0))).counts_LSE
    imbalance4_L, imbalance8_L = (imbalance_L(counts_LSE, static_placement(48, 128, ranks), ranks) for ranks in (4, 8))
    assert imbalance4_L.mean() == pytest.approx(1.34, abs=0.06)  # measured: 1.34 on average over layers, 1.70 at worst
    assert 1.55 < imbalance4_L.max() < 1.95
    assert np.percentile(imbalance8_L, 99) == pytest.approx(2.3, abs=0.35)  # measured: 2.3


def test_topics_are_nearly_uncorrelated():
    config = replace(QWEN, topics=2, popularity=0.0)
    window = next(synthetic_windows(config, np.random.default_rng(0)))
    load_JE = [window.counts_NLE[window.topic_N == topic].sum(axis=(0, 1)) for topic in range(2)]
    assert abs(np.corrcoef(load_JE)[0, 1]) < 0.3


@given(st.integers(1, 3), st.integers(1, 4), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_all_views_of_a_window_count_the_same_tokens(sources, layers, persistence, seed):
    config = replace(SMALL, sources=sources, layers=layers, persistence=persistence)
    window = next(synthetic_windows(config, np.random.default_rng(seed)))
    k, tokens = config.experts_per_token, config.requests * config.tokens_per_request
    assert (window.counts_LSE.sum(axis=2) == tokens * k).all()
    assert (window.counts_NLE.sum(axis=2) == config.tokens_per_request * k).all()
    for s in range(sources):
        by_request_LE = window.counts_NLE[window.source_N == s].sum(axis=0)
        assert (by_request_LE == window.counts_LSE[:, s]).all()
    load_LE = window.counts_LSE.sum(axis=1)
    assert (window.transitions_LEE.sum(axis=2) == k * load_LE[:-1]).all()
    assert (window.transitions_LEE.sum(axis=1) == k * load_LE[1:]).all()


def test_persistence_keeps_topics_with_their_sources():
    def home_share(persistence: float) -> float:
        config = replace(SMALL, persistence=persistence, requests=400, tokens_per_request=1)
        window = next(synthetic_windows(config, np.random.default_rng(0)))
        return float((window.topic_N == window.source_N).mean())

    assert home_share(1.0) == 1.0
    assert home_share(0.5) == pytest.approx(0.5 + 0.5 / 4, abs=0.05)
    assert home_share(0.0) == pytest.approx(1 / 4, abs=0.05)


def test_drift_changes_topics_but_not_the_router():
    def topics(drift: float) -> list[tuple[int, ...]]:
        windows = synthetic_windows(replace(SMALL, persistence=1.0, drift=drift), np.random.default_rng(0))
        return [tuple(window.topic_N[:: SMALL.requests].tolist()) for window in islice(windows, 5)]

    assert topics(0.0) == [(0, 1)] * 5
    assert all(
        a != b
        for before, after in zip(topics(1.0), topics(1.0)[1:], strict=False)
        for a, b in zip(before, after, strict=True)
    )
    config = replace(SMALL, persistence=1.0, requests=200)
    first, second = islice(synthetic_windows(config, np.random.default_rng(0)), 2)
    assert np.corrcoef(first.counts_LSE.ravel(), second.counts_LSE.ravel())[0, 1] > 0.99


def test_sources_differ_only_by_their_topics():
    def best_remote(persistence: float) -> float:
        """Remote share with every expert at the source that uses it most."""
        counts_LSE = next(synthetic_windows(replace(SMALL, requests=100, persistence=persistence), rng)).counts_LSE
        return float(1 - counts_LSE.max(axis=1).sum() / counts_LSE.sum())

    rng = np.random.default_rng(0)
    assert best_remote(1.0) < 0.35 < 0.45 < best_remote(0.0)
