"""One frame of ``gimbal top``: it fits, and says what the snapshot says."""

import io
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from gimbal_jax.cli.top_screen import BLOCKS, MAX_CELL, flowed, frame, seconds, shares, span, sparkline, stacked
from tests.serving.fake_server import PLACEMENT, FakeCore
from tests.serving.monitoring.test_dashboard import snapshot_of
from tests.serving.monitoring.test_live_snapshot import RECORD

AMOUNTS = st.floats(0, 1e6)


def printed(data, width, rows, color=False, lost=""):
    """The frame's lines, without trailing blanks."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(frame(data, width, rows, color, lost))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def big(layers, experts, ranks):
    """A snapshot as of a large model, whose rank 0 has twice the traffic of the others."""
    data = snapshot_of(FakeCore(), RECORD)
    tokens = [[200] * (experts // ranks) + [100] * (experts - experts // ranks)] * layers
    data["experts"] |= {"layers": list(range(layers)), "tokens_LP": tokens, "imbalance_L": [1.5] * layers}
    data["mesh"] = {"dp": 2, "tp": ranks // 2, "ranks": ranks}
    return data


@given(st.lists(AMOUNTS, min_size=1, max_size=6), st.integers(1, 200), st.floats(1, 3))
def test_a_stacked_bar_is_as_long_as_its_sum(values, width, slack):
    full = max(sum(values), 1e-3) * slack
    lengths = stacked(values, full, width)
    assert min(lengths) >= 0
    assert sum(lengths) == pytest.approx(width * sum(values) / full, abs=0.51)
    for length, value in zip(lengths, values, strict=True):
        assert length == pytest.approx(width * value / full, abs=1.01)


def test_a_bar_never_leaves_its_place():
    assert stacked([5.0, 10.0], 10.0, 8) == [4, 4]
    assert stacked([0.0, 0.0], 0.0, 8) == [0, 0]


def test_sparklines():
    assert sparkline([0, 7, None, 3.5], 10) == "▁█ ▅"
    assert sparkline([9, 0, 1], 2) == "▁█"
    assert sparkline([0, 0], 5) == BLOCKS[0] * 2
    assert sparkline([None], 5) == " "


@pytest.mark.parametrize(
    ("layers", "slots", "ranks", "rows", "width"),
    [(3, 8, 4, 3, 200), (94, 128, 8, 20, 74), (48, 128, 64, 48, 60), (5, 16, 16, 2, 20), (1, 4, 1, 1, 3)],
)
def test_the_map_keeps_the_hottest_cell_of_each_rank(layers, slots, ranks, rows, width):
    tokens_LP = np.random.default_rng(0).integers(1, 1000, (layers, slots))
    share_LP = tokens_LP * slots / tokens_LP.sum(axis=1, keepdims=True)
    shown = shares(tokens_LP, ranks, rows, width)
    assert shown.shape[0] == rows and shown.shape[1] <= width
    assert set(shown[~np.isnan(shown)]) <= set(share_LP.ravel())
    if np.isnan(shown).any():
        gaps = np.flatnonzero(np.isnan(shown[0]))
        assert len(gaps) == ranks
        parts = np.split(shown, gaps + 1, axis=1)[:-1]
        for part, of_rank in zip(parts, np.split(share_LP, ranks, axis=1), strict=True):
            assert np.nanmax(part) == of_rank.max()
            assert part.shape[1] - 1 <= slots // ranks * MAX_CELL


@pytest.mark.parametrize("color", [True, False])
@pytest.mark.parametrize(("width", "rows"), [(80, 24), (100, 30), (120, 50), (200, 70), (60, 40)])
@pytest.mark.parametrize(("layers", "experts", "ranks"), [(2, 4, 4), (48, 128, 8), (94, 128, 64)])
def test_a_frame_fits_the_terminal(width, rows, layers, experts, ranks, color):
    lines = printed(big(layers, experts, ranks), width, rows, color)
    assert len(lines) <= rows
    assert max(map(len, lines)) <= width
    assert any(line.lstrip().startswith("0  ") for line in lines)  # its map


def test_a_frame_says_what_the_snapshot_says():
    class Core(FakeCore):
        def status(self):
            status = super().status()
            records = PLACEMENT, replace(PLACEMENT, outcome="kept", reason="even")
            return replace(status, placement=replace(status.placement, records=records))

    data = snapshot_of(Core(), replace(RECORD, arrival=99.0, total_s=0.5))
    text = "\n".join(printed(data, 120, None))
    assert "gimbal small  ● serving  2 x 2 = 4 ranks" in text
    assert "! 2 traffic windows could not be written." in text
    assert "first token  p50 1.00 s" in text
    for index, engine in enumerate(data["engines"]):
        (line,) = [line for line in text.splitlines() if line.split()[:1] == [str(index)] and "none" in line]
        assert line.split()[1:3] == [str(engine["running"]), str(engine["waiting"])]
    assert f"rank imbalance {data['experts']['imbalance']:.2f}x" in text
    assert "✓ applied       3 experts, gain 20.0%  imbalance 1.50x → 1.10x, remote 50% → 40%, far 25% → 12%" in text
    assert (
        "- kept          3 experts, gain 20.0%  imbalance 1.50x → 1.10x, remote 50% → 40%, far 25% → 12%; even" in text
    )
    assert "connection lost" not in text


@pytest.mark.parametrize("color", [True, False])
def test_80_columns_hold_every_policy_and_caption(color):
    data = big(4, 8, 4)
    data["policies"] = {"dispatch": "sglang_total_tokens", "queue": "sjf_aging", "placement": "eplb_hierarchical"}
    lines = printed(data, 80, 40, color)
    text = " ".join(" ".join(lines).split())
    for words in (
        *("dispatch sglang_total_tokens", "queue sjf_aging", "placement eplb_hierarchical"),
        *("prefill left", "prefill waiting", "sent, not seen yet", "KV use", "expert pressure"),
        *("rank imbalance", "worst", "of tokens leave their engine"),
    ):
        assert words in text
    assert not [line for line in lines if "…" in line and "imbalance 1.50x" not in line]
    assert max(map(len, lines)) <= 80


def test_parts_flow_into_lines_whole():
    parts = [Text(word) for word in ("one", "two", "three")]
    assert [line.plain for line in flowed(parts, 8)] == ["one  two", "three"]
    assert [line.plain for line in flowed(parts, 7, gap=" ")] == ["one two", "three"]
    assert [line.plain for line in flowed(parts, 2)] == ["one", "two", "three"]


def test_a_lost_connection_is_said_first():
    lines = printed(snapshot_of(FakeCore()), 100, None, lost="no answer from there: refused")
    assert "✕ connection lost" in lines[0]
    warnings = [line for line in lines if line.startswith("! ")]
    assert warnings == ["! no answer from there: refused; the data below are old"]


def test_no_traffic_and_no_colours():
    data = big(2, 4, 4)
    with_traffic = printed(data, 80, None)
    assert "   0  ▒▒▒▒ ░░░░ ░░░░ ░░░░" in with_traffic  # 1.6 and 0.8 times an even share
    data["experts"]["tokens_LP"] = [[0] * 4] * 2
    assert "no expert traffic counted yet" in printed(data, 80, None)


def test_durations():
    assert [seconds(value) for value in (None, 2e-5, 0.0021, 0.21, 2.1, 21.0, 75.0)] == [
        *("-", "20 µs", "2.1 ms", "210 ms", "2.10 s", "21.0 s", "1 min 15 s")
    ]
    assert [span(value) for value in (59.9, 61, 3700, 90000)] == ["59 s", "1 min 1 s", "1 h 1 min", "1 d 1 h"]
