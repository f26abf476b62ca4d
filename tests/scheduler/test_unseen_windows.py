"""What decisions are worth on the traffic that comes after them, which is what the defaults are chosen by."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from gimbal_jax.config import MeshConfig, PlacementConfig
from gimbal_jax.scheduler.placement import propose, static_placement
from gimbal_jax.scheduler.traffic import imbalance_L, smooth_windows
from gimbal_jax.scheduler.windows import WindowConfig, synthetic_windows

MESH = MeshConfig(dp=2, tp=2)
ALIKE = WindowConfig(layers=4, experts=64, experts_per_token=4, requests=20)
"""Short windows of sources that do not differ: whatever locality one window shows is chance."""
DRIFTING = replace(ALIKE, persistence=0.5, drift=0.2)
STICKY = replace(ALIKE, persistence=1.0)
DEFAULT = PlacementConfig()
PAPERS_CRITERION = replace(DEFAULT, beta=0.2)
"""The weights that research/calibrate_placement.py finds by the paper's criterion."""


def serve(traffic: WindowConfig, config: PlacementConfig) -> tuple[float, int]:
    """Mean imbalance of each window under what was decided before it, and the experts moved, over three routers."""
    imbalances, moved = [], 0
    for seed in range(3):
        slot_LE = static_placement(traffic.layers, traffic.experts, MESH.ranks)
        smoothed_LSE = np.zeros((traffic.layers, traffic.sources, traffic.experts), np.int64)
        for i, window in enumerate(islice(synthetic_windows(traffic, np.random.default_rng(seed)), 10)):
            if i:
                imbalances.append(imbalance_L(window.counts_LSE, slot_LE, MESH.ranks).mean())
            smoothed_LSE = smooth_windows(smoothed_LSE, window.counts_LSE, config.smoothing)
            proposal = propose(smoothed_LSE, slot_LE, MESH, config)
            if proposal.apply:
                slot_LE, moved = proposal.slot_of_expert_LE, moved + proposal.experts_moved
    return float(np.mean(imbalances)), moved


def test_smoothing_moves_far_fewer_experts_for_equal_balance():
    imbalance, moved = serve(ALIKE, DEFAULT)
    last_window_imbalance, last_window_moved = serve(ALIKE, replace(DEFAULT, smoothing=0.0))
    assert 0 < moved < last_window_moved / 2
    assert imbalance < last_window_imbalance + 0.01


@pytest.mark.parametrize("traffic", [DRIFTING, STICKY], ids=["drifting", "sticky"])
def test_default_load_weight_balances_later_windows_better(traffic):
    """By the paper's criterion locality weighs more, of which later windows keep less than the decision saw."""
    assert serve(traffic, DEFAULT)[0] < serve(traffic, PAPERS_CRITERION)[0] - 0.02
