import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from examples.demo_report import RunReport, comparison_table, draw, expert_traffic
from gimbal_jax.bench.measurement import Measurement, Traffic, summarise

# One layer, two sources of one rank each, four experts: two slots per rank.
FIRST = np.array([[0, 1, 2, 3]])
SECOND = np.array([[0, 2, 1, 3]])
IN_FIRST = np.array([[[3, 5, 0, 0], [0, 0, 0, 2]]])
IN_SECOND = np.array([[[10, 0, 2, 2], [0, 6, 0, 4]]])


def samples() -> list[Traffic]:
    start = np.zeros((1, 2, 4), int)
    return [Traffic(start, FIRST), Traffic(IN_FIRST, SECOND), Traffic(IN_FIRST + IN_SECOND, SECOND)]


def report(name: str, tokens_served: int = 34) -> RunReport:
    clients = summarise([Measurement(0.0, 30, 5, ttft_s=0.25, e2e_s=1.25)])
    return RunReport(name, 2, clients, expert_traffic(samples(), 2), 2, 34, tokens_served)


def test_each_interval_counts_under_its_own_placement():
    traffic = expert_traffic(samples(), ranks=2)
    # First: ranks carry 8 and 2 of 10, all local. Second: experts 0, 2 on rank 0 and 1, 3 on rank 1,
    # which carry 12 and 12 of 24; source 0 sends 2 away, source 1 none.
    assert traffic.imbalance == pytest.approx((1.6 * 10 + 1.0 * 24) / 34)
    assert traffic.remote_share == pytest.approx(2 / 34)


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


def test_table_holds_every_run_and_number():
    out = io.StringIO()
    Console(file=out, width=120).print(comparison_table([report("base"), report("gimbal", tokens_served=35)]))
    text = out.getvalue()
    for wanted in ("base", "gimbal", "250 / 250", "1.176", "5.9%", "34 / 34", "34 / 35"):
        assert wanted in text, text


def test_picture_is_written(tmp_path):
    path = tmp_path / "demo.png"
    draw([report("base"), report("gimbal")], path)
    assert path.read_bytes().startswith(b"\x89PNG")
