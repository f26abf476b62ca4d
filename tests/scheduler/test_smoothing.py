"""Why placement decides from smoothed windows: one short window's noise looks like something to gain."""

from dataclasses import replace
from itertools import islice

import numpy as np

from gimbal_jax.config import PlacementConfig
from gimbal_jax.scheduler.placement import propose, static_placement
from gimbal_jax.scheduler.traffic import imbalance_L, smooth_windows
from gimbal_jax.scheduler.windows import WindowConfig, synthetic_windows

RANKS = 4
ALIKE = WindowConfig(layers=4, experts=64, experts_per_token=4, requests=20)
"""Short windows of sources that do not differ: whatever locality one window shows is chance."""


def serve(windows: list[np.ndarray], config: PlacementConfig) -> tuple[float, int]:
    """Mean imbalance of each window under what was decided before it, and the experts moved in all."""
    slot_LE = static_placement(ALIKE.layers, ALIKE.experts, RANKS)
    smoothed_LSE, moved, imbalances = np.zeros_like(windows[0]), 0, []
    for counts_LSE in windows:
        imbalances.append(imbalance_L(counts_LSE, slot_LE, RANKS).mean())
        smoothed_LSE = smooth_windows(smoothed_LSE, counts_LSE, config.smoothing)
        proposal = propose(smoothed_LSE, slot_LE, RANKS, config)
        if proposal.apply:
            slot_LE, moved = proposal.slot_of_expert_LE, moved + proposal.experts_moved
    return float(np.mean(imbalances[1:])), moved


def test_the_default_moves_far_fewer_experts_for_the_same_balance():
    smooth, last_window_only = PlacementConfig(), replace(PlacementConfig(), smoothing=0.0)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        windows = [window.counts_LSE for window in islice(synthetic_windows(ALIKE, rng), 10)]
        imbalance, moved = serve(windows, smooth)
        noisy_imbalance, noisy_moved = serve(windows, last_window_only)
        assert 0 < moved < noisy_moved / 2
        assert imbalance < noisy_imbalance + 0.02
