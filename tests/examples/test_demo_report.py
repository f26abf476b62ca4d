"""The table, the notes and the picture of the demo, on made-up measurements."""

import io
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from examples.demo_report import RunReport, comparison_table, draw, expert_traffic, notes
from gimbal_jax.bench.measurement import Measurement, Summary, Traffic, summarise

# One layer, two sources of one rank each, four experts: two slots per rank.
FIRST = np.array([[0, 1, 2, 3]])
SECOND = np.array([[0, 2, 1, 3]])
IN_FIRST = np.array([[[3, 5, 0, 0], [0, 0, 0, 2]]])
IN_SECOND = np.array([[[10, 0, 2, 2], [0, 6, 0, 4]]])


def samples() -> list[Traffic]:
    start = np.zeros((1, 2, 4), int)
    return [Traffic(start, FIRST), Traffic(IN_FIRST, SECOND), Traffic(IN_FIRST + IN_SECOND, SECOND)]


def clients(ttft_s: float, error: str = "") -> Summary:
    good = Measurement(0.0, 30, 5, ttft_s=ttft_s, e2e_s=ttft_s + 1)
    return summarise([good, *([replace(good, error=error)] if error else [])])


def report(name: str, rounds: Sequence[Summary] = (), tokens_served: int = 34) -> RunReport:
    rounds = rounds or [clients(0.25)]
    return RunReport(name, 2, tuple(rounds), expert_traffic(samples(), 2), 2, 3, 34, tokens_served)


def rows_of(reports) -> list[list[str]]:
    table = comparison_table(reports)
    return [list(row) for row in zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True)]


def test_each_interval_counts_under_its_own_placement():
    traffic = expert_traffic(samples(), ranks=2)
    # First: ranks carry 8 and 2 of 10, all local. Second: experts 0, 2 on rank 0 and 1, 3 on rank 1,
    # which carry 12 and 12 of 24; source 0 sends 2 away, source 1 none.
    assert traffic.imbalance == pytest.approx((1.6 * 10 + 1.0 * 24) / 34)
    assert traffic.remote_share == pytest.approx(2 / 34)


def test_the_last_quarter_is_the_shortest_run_of_intervals_with_a_quarter_of_the_tokens():
    traffic = expert_traffic(samples(), ranks=2)
    assert traffic.imbalance_at_end == 1.0
    assert traffic.remote_share_at_end == pytest.approx(2 / 24)
    idle = [*samples(), samples()[-1]]
    assert expert_traffic(idle, ranks=2).imbalance_at_end == 1.0


def test_before_and_after():
    traffic = expert_traffic(samples(), ranks=2)
    assert np.array_equal(traffic.before.counts_LSE, IN_FIRST)
    assert np.array_equal(traffic.before.slot_of_expert_LE, FIRST)
    assert np.array_equal(traffic.after.counts_LSE, IN_SECOND)
    assert np.array_equal(traffic.after.slot_of_expert_LE, SECOND)


def test_before_is_the_whole_run_when_nothing_moves():
    still = [replace(sample, slot_of_expert_LE=FIRST) for sample in samples()]
    assert np.array_equal(expert_traffic(still, ranks=2).before.counts_LSE, IN_FIRST + IN_SECOND)


def test_no_traffic_is_an_error():
    with pytest.raises(ValueError, match="no traffic"):
        expert_traffic(samples()[:1] * 2, ranks=2)


def test_table_shows_experts_first_then_medians_and_ranges():
    rounds = [clients(0.25), clients(0.05, "full"), clients(0.5)]
    rows = rows_of([report("base"), report("gimbal", rounds, tokens_served=35)])
    assert rows == [
        ["rank imbalance at the end", "1.000", "1.000"],
        ["remote share at the end", "8.3%", "8.3%"],
        ["experts moved", "2", "2"],
        ["tokens counted / served", "34 / 34", "34 / 35"],
        ["medians (min to max)", "", ""],
        ["TTFT mean (ms)", "250 (250 to 250)", "250 (50 to 500)"],
        ["TPOT mean (ms)", "250 (250 to 250)", "250 (250 to 250)"],
        ["E2E mean (ms)", "1,250 (1,250 to 1,250)", "1,250 (1,050 to 1,500)"],
        ["E2E p99 (ms)", "1,250 (1,250 to 1,250)", "1,250 (1,050 to 1,500)"],
        ["output tokens per s", "4.0 (4.0 to 4.0)", "4.0 (3.3 to 4.8)"],
        ["all tokens per s", "28.0 (28.0 to 28.0)", "28.0 (23.3 to 33.3)"],
        ["requests failed / all", "0 / 1", "1 / 4"],
    ]


def test_table_fits_eighty_columns():
    out = io.StringIO()
    Console(file=out, width=80).print(comparison_table([report("vllm_classic, fcfs, eplb"), report("gimbal")]))
    assert "…" not in out.getvalue()


def test_a_difference_of_token_counts_is_explained():
    same = [report("base"), report("gimbal")]
    *others, last = notes([same[0], report("gimbal", tokens_served=30)])
    assert others == notes(same) and "gimbal: 3" in last


def test_picture_is_written(tmp_path):
    path = tmp_path / "demo.png"
    draw([report("base"), report("gimbal", [clients(0.25), clients(0.5)])], path)
    assert path.read_bytes().startswith(b"\x89PNG")
