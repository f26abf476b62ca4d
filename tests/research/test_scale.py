"""research/scale.py: its arithmetic by hand, and a small sweep."""

import numpy as np
import pytest

from research import scale
from research.scale import Size, growth, hottest_expert, placement_record, size_where_full
from tests.simulation.rig import EXPERTS, LAYERS, MODEL


def test_growth_is_that_of_the_largest_sizes():
    assert growth([1, 2, 4, 8, 16], [9, 9, 4 * 9, 16 * 9, 64 * 9]) == pytest.approx(2.0)


def test_a_dispatching_thread_is_full_where_dispatches_take_all_its_time():
    # 10 us at 10 engines, as many requests as engines: 1e5 engines if the time stays the same.
    assert size_where_full(10, 10.0, 0.0, rate=1.0) == pytest.approx(1e5)
    # If it grows with the engines, 100 times as many engines make each dispatch 100 times as long: 1 s for 1,000.
    assert size_where_full(10, 10.0, 1.0, rate=1.0) == pytest.approx(1000)


def test_the_hottest_expert_by_hand():
    counts_LSE = np.array([[[3, 1, 0, 0], [1, 1, 1, 1]]])
    assert (hottest_expert(counts_LSE, ranks=2), hottest_expert(counts_LSE, ranks=4)) == (1.0, 2.0)


def test_a_placement_record_measures_the_next_window(monkeypatch):
    monkeypatch.setattr(scale, "MODEL", MODEL)
    record = placement_record("gimbal", Size(2, 4), 0.8)
    assert record["experts"] == EXPERTS and record["moved"] > 0 and record["rounds"] >= LAYERS
    assert record["imbalance_after"] < record["imbalance_before"]
    assert record["remote_after"] < record["remote_before"]
    # With one expert on each rank no placement is more even, so none moves.
    crowded = placement_record("eplb", Size(2, 32), 0.0)
    assert crowded["experts"] == 32 and crowded["moved"] == 0
    assert crowded["imbalance_after"] == pytest.approx(crowded["hottest_expert"])


def test_a_small_sweep_fills_all_tables(monkeypatch):
    monkeypatch.setattr(scale, "MODEL", MODEL)
    records = list(scale.sweep((Size(2, 4), Size(4, 8)), requests=2, repeats=1))
    assert [record["part"] for record in records] == ["dispatch"] * 6 + ["placement"] * 12 + ["run"] * 2
    assert [table.row_count for table in scale.tables(records)] == [3, 12, 6, 2]
