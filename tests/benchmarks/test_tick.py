"""The benches of the tick: they run what they say they run."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from benchmarks import placement as bench_placement
from benchmarks.tick import LOADS, Load, at_scale, loaded_core, over_time, tick_seconds
from gimbal_jax.scheduler.placement import propose
from gimbal_jax.serving.engine.meters import PHASES
from gimbal_jax.serving.placement import rebalance
from tests.serving.statuses import per_engine


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_all_rows_run_and_the_load_is_as_described(load: Load):
    rows, ticks = 4, 20
    with loaded_core(2, rows, load) as (server, clients):
        before = server.status()
        seconds = tick_seconds(server, clients, ticks)
        after = server.status()
        assert len(seconds) == ticks
        assert after.steps.count - before.steps.count == ticks
        for engine in server.engines:
            assert engine.running >= rows - 1  # one may have ended in this tick
            assert engine.waiting >= load.waiting
    computed = np.array(per_engine(after, "tokens_computed")) - per_engine(before, "tokens_computed")
    prefill = np.array(per_engine(after, "prefill_tokens")) - per_engine(before, "prefill_tokens")
    assert (computed - prefill >= (rows - 1) * ticks * 0.8).all()
    assert per_engine(after, "preemptions") == (0, 0)


def test_prefill_and_decode_share_steps():
    load = next(load for load in LOADS if load.name == "prefill chunks")
    with loaded_core(1, 64, load) as (server, clients):
        before = per_engine(server.status(), "prefill_tokens")[0]
        tick_seconds(server, clients, 8)  # each ends 64 / 256 of a request on average
        assert per_engine(server.status(), "prefill_tokens")[0] - before >= load.prompt


def test_every_load_and_size_has_figures():
    found = at_scale(LOADS[:2], (1, 2), rows=2, ticks=12)
    assert [(row["load"], row["engines"]) for row in found] == [
        (load.name, engines) for load in LOADS[:2] for engines in (1, 2)
    ]
    assert all(set(PHASES) < set(row) for row in found)


def test_memory_is_printed_ten_times(capsys):
    over_time(40, rows=2)
    assert capsys.readouterr().out.count(" ticks: ") == 10


def test_ticks_are_timed_with_and_without_decisions(monkeypatch):
    monkeypatch.setattr(bench_placement, "windows_LSE", lambda: [np.ones((48, 2, 128), np.int64)])
    made: list[int] = []

    def policy(counts_LSE, *others):
        made.append(1)
        return propose(counts_LSE, *others)

    monkeypatch.setattr(rebalance, "propose", policy)
    for window_steps in (20, bench_placement.NEVER):
        made.clear()
        milliseconds = bench_placement.tick_ms("gimbal", ThreadPoolExecutor(1), window_steps, 20e-3, 30)
        assert len(milliseconds) >= 30
        assert np.median(milliseconds) >= 10.0  # a step takes 20 ms, less what the clients take of it
        assert (len(made) >= bench_placement.LEAST) == (window_steps == 20)
