"""research/calibrate_placement.py on few windows."""

import json

import matplotlib.image
import numpy as np
import pytest

from gimbal_jax.config import PlacementConfig
from gimbal_jax.scheduler.counts_file import save_counts
from gimbal_jax.scheduler.distance import distance_SR
from gimbal_jax.scheduler.objective import window_objective
from gimbal_jax.scheduler.placement import propose
from gimbal_jax.scheduler.traffic import rank_of_expert
from research import calibrate_placement
from research.calibrate_placement import KINDS, compare, synthetic


def test_drifting_windows_start_from_the_placement_of_the_previous_window():
    windows = synthetic(per_kind=2)
    assert windows.kind_L == [kind for kind in KINDS for _ in range(2)]
    contiguous_L = (windows.slot_of_expert_LE == np.arange(128)).all(axis=1)
    assert contiguous_L.tolist() == [kind != "drifting" for kind in windows.kind_L]
    assert windows.sample(4).kind_L == ["diverse", "narrow", "topic-sticky", "drifting"]


def test_a_result_has_the_measures_of_every_policy():
    windows = synthetic(per_kind=1, seed=1)
    config = PlacementConfig(beta=0.3, gamma=0.1)
    result = compare(windows, config, time_limit_s=10, gap=1e-3)
    apart_SR = distance_SR(windows.mesh, config.far_distance)
    objective = window_objective(windows.counts_LSE, windows.slot_of_expert_LE, apart_SR, config)
    proposal = propose(windows.counts_LSE, windows.slot_of_expert_LE, windows.mesh, config)
    rank_LE = rank_of_expert(proposal.slot_of_expert_LE, 4)
    greedy, exact = result.policies["gimbal"], result.policies["exact"]
    assert greedy["moved"] == pytest.approx(proposal.experts_moved / rank_LE.size)
    assert greedy["fullest"] == pytest.approx(objective.load_LR(rank_LE).max(axis=1).mean())
    assert exact["same"] == exact["same_moves"] == 1.0
    assert result.solver["windows"] == result.solver["optimal"] == 4
    assert abs(result.policies["gimbal_refined"]["excess"]) < 0.005
    assert result.policies["staying"]["moved"] == 0.0 < greedy["excess"] < result.policies["staying"]["excess"]


def test_the_command_writes_tables_figure_and_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate_placement, "BETAS", (0.03, 0.3))
    monkeypatch.setattr(calibrate_placement, "GAMMAS", (1.0,))
    monkeypatch.setattr(
        calibrate_placement, "QUALITY_WEIGHTS", {"paper": (1.0, 0.0025, 1.0), "default": (1.0, 0.1, 0.3)}
    )
    windows = synthetic(per_kind=1)
    path = tmp_path / "real.npz"
    save_counts(path, windows.counts_LSE[:2], windows.slot_of_expert_LE[:2], {"ranks": 4})
    out = tmp_path / "out"
    calibrate_placement.main(counts=[path], per_kind=1, sweep_windows=2, out=out)
    found = json.loads((out / "calibration.json").read_text())
    points = [(row["load_term"], *row["weights"]) for row in found["sweep"]]
    assert points == [(term, 1.0, beta, 1.0) for term in ("square", "max") for beta in (0.03, 0.3)]
    assert {name: len(rows) for name, rows in found["quality"].items()} == {"synthetic": 4, "real.npz": 4}
    assert found["quality"]["real.npz"][0]["solver"]["windows"] == 2
    # raw tokens: beta is 0.0025 * T / R**2 with 4096 * 8 expert tokens in a layer
    assert found["quality"]["synthetic"][2]["weights"] == pytest.approx([1.0, 0.0025 * 32768 / 16, 128 / 32768])
    assert matplotlib.image.imread(out / "calibration.png").std() > 0.05
    shown = capsys.readouterr().out
    assert "synthetic: 4 windows" in shown and "real.npz: 2 windows" in shown and "gimbal_refined" in shown
