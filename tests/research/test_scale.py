"""scripts/scale: its arithmetic by hand, and a small sweep."""

import json

import matplotlib.image
import numpy as np
import pytest

from research import scale, scale_parts
from research.scale_parts import Size, growth, hottest_expert, placement_record, size_where_full, window_counts
from tests.simulation.rig import EXPERTS, LAYERS, MODEL, ROUTER, K

SIZES = (Size(2, 4), Size(4, 8))


def test_growth_is_that_of_the_largest_sizes():
    assert growth([1, 2, 4, 8, 16], [9, 9, 4 * 9, 16 * 9, 64 * 9]) == pytest.approx(2.0)
    assert growth([2, 4], [3, 3]) == pytest.approx(0.0)


def test_where_a_dispatching_thread_is_full():
    # 10 us at 10 engines, as many requests as engines: 1e5 engines' worth, if the time stays what it is.
    assert size_where_full(10, 10.0, 0.0, rate=1.0) == pytest.approx(1e5)
    # If it grows as the engines do: 100 times as many engines, each dispatch 100 times as long: 1 s for 1,000.
    assert size_where_full(10, 10.0, 1.0, rate=1.0) == pytest.approx(1000)


def test_windows_hold_two_blocks_of_each_request():
    counts_LSE = window_counts(ROUTER, 3, np.random.default_rng(0))
    assert (counts_LSE.sum(axis=2) == scale_parts.WINDOW_REQUESTS * 2 * 32 * K).all()


def test_the_hottest_expert_by_hand():
    counts_LSE = np.array([[[3, 1, 0, 0], [1, 1, 1, 1]]])
    assert hottest_expert(counts_LSE, ranks=2) == 1.0
    assert hottest_expert(counts_LSE, ranks=4) == 2.0


def test_a_placement_record_says_what_the_next_window_gains(monkeypatch):
    monkeypatch.setattr(scale_parts, "MODEL", MODEL)
    record = placement_record("gimbal", Size(2, 4), 0.8, seed=0)
    assert record["experts"] == EXPERTS and record["moved"] > 0 and record["rounds"] >= LAYERS
    assert record["imbalance_after"] < record["imbalance_before"]
    assert record["remote_after"] < record["remote_before"]
    assert record["bytes"] == record["moved"] * 3 * 8 * 4 * 2  # three matrices of 8 by 4, two bytes a number
    # With an expert on each rank none can be more even, and none moves for it.
    crowded = placement_record("eplb", Size(2, 32), 0.0, seed=0)
    assert crowded["experts"] == 32 and crowded["moved"] == 0
    assert crowded["imbalance_after"] == pytest.approx(crowded["hottest_expert"])


def test_a_small_sweep_writes_records_picture_and_lines(monkeypatch, tmp_path):
    monkeypatch.setattr(scale_parts, "MODEL", MODEL)
    path = tmp_path / "scale.jsonl"
    records = scale.sweep(SIZES, "gimbal", requests=2, rate=4.0, repeats=1, seed=0, path=path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == records
    assert len(scale.only(records, part="dispatch")) == 3 * 2
    assert len(scale.only(records, part="placement")) == 2 * 3 * 2
    runs = scale.only(records, part="run")
    assert [run["requests"] for run in runs] == [4, 8] and all(run["steps"] > 0 for run in runs)
    assert len(list(scale.tables(records))) == 1 + 2 + 1
    lines = list(scale.closing_lines(records, 4.0))
    assert len([line for line in lines if line.startswith("placement")]) == 6
    assert f"{runs[-1]['tokens_per_step']:,.0f} tokens" in "\n".join(lines)
    scale.draw(records, tmp_path / "scale.png")
    assert matplotlib.image.imread(tmp_path / "scale.png").std() > 0.05
