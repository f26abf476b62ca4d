"""The parts of the live view against naive recounts."""

import itertools
import json
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.config import DispatchConfig
from gimbal_jax.scheduler.dispatch_decision import Decision, DispatchRecord
from gimbal_jax.scheduler.dispatcher import Dispatcher
from gimbal_jax.scheduler.trace import idle_trace
from gimbal_jax.serving.engine.queue import QueueHead
from gimbal_jax.serving.frontend.record import Origin, RequestRecord
from gimbal_jax.serving.monitoring.live_format import TEXT
from gimbal_jax.serving.monitoring.live_snapshot import (
    BUCKET_S,
    BUCKETS,
    DECISIONS,
    RECENT_S,
    EndedRequest,
    TokenSample,
    active_warnings,
    bucket_history,
    ended_request,
    engine_rows,
    map_experts,
    percentiles,
    recent_rates,
    request_row,
    summarise_dispatch,
    summarise_latency,
    summarise_placement,
)
from gimbal_jax.serving.placement.records import Outcome, PlacementTotals
from tests.serving.fake_server import CONFIG, PLACEMENT, FakeCore

RECORD = RequestRecord(
    request_id="a",
    origin=Origin("someone"),
    engine=1,
    rule="close",
    priority=0,
    prompt_tokens=7,
    cached_tokens=4,
    output_tokens=5,
    outcome="stop",
    error="",
    arrival=10.0,
    queue_s=0.5,
    first_token_s=1.0,
    total_s=3.0,
)
FULL = st.floats(0, 1e3, allow_subnormal=False)


def status(**changes):
    return replace(FakeCore().status(), **changes)


def placement(**changes):
    return replace(FakeCore().status().placement, **changes)


def traces(*changes, time=100.0):
    return tuple(replace(idle_trace(engine, time), **fields) for engine, fields in enumerate(changes))


def test_incomplete_request_has_no_total_time():
    assert ended_request(RECORD) == EndedRequest(13.0, "stop", 1.0, 0.5, 3.0)
    assert ended_request(replace(RECORD, outcome="length")).total_s == 3.0
    for outcome in ("cancelled", "refused", "abort", "error"):
        assert ended_request(replace(RECORD, outcome=outcome)).total_s is None


def test_long_text_of_clients_is_cut():
    long = replace(RECORD, request_id="i" * 10**6, origin=Origin("c" * 10**6), error="e" * 10**6)
    row = request_row(long, 20.0)
    assert (row["id"], row["client"], row["error"]) == ("i" * TEXT, "c" * TEXT, "e" * TEXT)
    assert row["age_s"] == 7.0


@given(st.lists(st.one_of(st.none(), FULL)))
def test_percentiles_are_values_by_nearest_rank(values):
    known = [value for value in values if value is not None]
    for share, answer in zip((0.5, 0.99), percentiles(values).values(), strict=True):
        if not known:
            assert answer is None
            continue
        assert answer in known
        assert sum(value <= answer for value in known) >= share * len(known)
        assert sum(value < answer for value in known) < share * len(known)


def test_latency_covers_the_last_minute_only():
    ended = [
        EndedRequest(39.9, "error", 9.0, 9.0, 9.0),
        EndedRequest(40.0, "length", 1.0, None, 4.0),
        EndedRequest(99.0, "cancelled", 2.0, 0.1, None),
        EndedRequest(99.5, "refused", None, None, None),
    ]
    assert summarise_latency(ended, 40.0 + RECENT_S) == {
        "outcomes": {"length": 1, "cancelled": 1, "refused": 1},
        "ttft": {"p50": 1.0, "p99": 2.0},
        "tpot": {"p50": 0.1, "p99": 0.1},
        "e2e": {"p50": 4.0, "p99": 4.0},
    }


@given(
    st.lists(st.tuples(st.floats(0, 400), st.integers(0, 500)), min_size=1, max_size=40).map(sorted),
    st.floats(0, 50),
)
def test_rates_add_up_to_the_tokens_between_the_edges(steps, later):
    total, samples = 0, [TokenSample(0.0, 0, 0)]
    for time, tokens in steps:
        if time > samples[-1].time:
            total += tokens
            samples.append(TokenSample(time, 2 * total, total))
    now = samples[-1].time + later
    shown = bucket_history([], samples, now)
    end = np.floor(now / BUCKET_S) * BUCKET_S
    edges = np.interp([end - BUCKETS * BUCKET_S, end], [s.time for s in samples], [s.generated for s in samples])
    assert sum(shown["generated"]) * BUCKET_S == pytest.approx(edges[1] - edges[0], abs=0.01 * BUCKETS * BUCKET_S)
    assert shown["prompt"] == pytest.approx([2 * rate for rate in shown["generated"]], abs=0.02)
    assert min(shown["generated"]) >= 0


def test_recent_rates_cover_the_last_bucket_only():
    samples = [TokenSample(0.0, 0, 0), TokenSample(95.0, 900, 10_000), TokenSample(100.0, 1000, 10_250)]
    assert recent_rates(samples, 100.0) == {"prompt": 20.0, "generated": 50.0}
    assert recent_rates(samples, 200.0) == {"prompt": 0.0, "generated": 0.0}


@given(st.lists(st.tuples(st.floats(0, 500), FULL), max_size=60), st.floats(0, 500))
def test_history_puts_each_request_into_the_bucket_of_its_end(requests, now):
    ended = [EndedRequest(end, "stop", value, value, value) for end, value in requests]
    shown = bucket_history(ended, [TokenSample(0.0, 0, 0)], now)
    current = int(now // BUCKET_S)
    for place in range(BUCKETS):
        number = current - BUCKETS + place
        values = [value for end, value in requests if end // BUCKET_S == number]
        assert {"p50": shown["ttft_p50"][place], "p99": shown["ttft_p99"][place]} == percentiles(values)
    series = [values for values in shown.values() if isinstance(values, list)]
    assert [len(values) for values in series] == [BUCKETS] * 8


def test_shown_scores_equal_the_dispatchers():
    config = replace(CONFIG, dispatch=DispatchConfig(close_scores=0.0))
    dispatcher = Dispatcher(2, config.dispatch, config.engine.token_budget)
    busy = traces(
        {"running_prefill_tokens": 30, "kv_use": 0.5, "expert_pressure": 3.0, "seen": 1, "running_requests": 4},
        {"waiting_prefill_tokens": 900, "kv_use": 0.25, "expert_pressure": 1.0, "waiting_requests": 2},
    )
    for number in range(4):
        dispatcher.dispatch(f"r{number}", 100 + number, 99.0, engine=number % 2)
    shown = engine_rows(status(traces=busy), dispatcher.compensation_after(busy), (), config, 100.25)
    dispatcher.observe(busy)
    decision = dispatcher.dispatch("next", 10, 100.25).decision
    assert decision.rule == "least_score"
    assert [engine["score"] for engine in shown] == list(decision.scores_S)
    for engine in (0, 1):
        assert shown[engine]["terms"] == {name: values_S[engine] for name, values_S in decision.terms.items()}
    assert [engine["terms"]["compensation"] for engine in shown] == [102, 101 + 103]
    assert [engine["running"] for engine in shown] == [4, 0]
    assert [engine["waiting"] for engine in shown] == [0, 2]
    assert [engine["trace_age_s"] for engine in shown] == [0.25, 0.25]
    assert [engine["free_pages"] for engine in shown] == [30, 31]
    assert [engine["kv_use"] for engine in shown] == [2 / 32, 1 / 32]  # of the same moment, not of the trace
    assert [engine["cached_pages"] for engine in shown] == [9, 3]
    assert [engine["prefix_hit_rate"] for engine in shown] == [0.4, 0]


def test_engine_is_idle_before_its_first_trace():
    shown = engine_rows(status(), (0, 0), (), CONFIG, 5.0)
    assert [engine["trace_age_s"] for engine in shown] == [None, None]
    assert [engine["score"] for engine in shown] == [0, 0]
    assert shown[0]["queue_head"] is None
    assert shown[1]["queue_head"] == {"id": "a", "waited_s": 1.5, "prefill_tokens": 40}


def test_id_of_the_queue_head_is_cut():
    head = QueueHead("x/" * 10**5, 0.0, 1)
    first, second = status().engines
    shown = engine_rows(status(engines=(replace(first, queue_head=head), second)), (0, 0), (), CONFIG, 5.0)
    assert shown[0]["queue_head"] == {"id": ("x/" * 10**5)[:TEXT], "waited_s": 0.0, "prefill_tokens": 1}


def test_dispatches_are_counted_by_rule_and_by_engine():
    decisions = [
        DispatchRecord(f"r{number}", float(number), Decision(number % 2, "close" if number % 3 else "stale"))
        for number in range(100)
    ]
    shown = summarise_dispatch({"close": 500, "stale": 1}, decisions, 99.5)
    recent = [record for record in decisions if 99.5 - record.time <= RECENT_S]
    assert len(recent) == 60
    assert shown["recent"] == Counter(record.decision.rule for record in recent)
    assert shown["total"] == {"close": 500, "stale": 1}
    assert shown["last"] == {"engine": 1, "rule": "stale", "age_s": 0.5}
    assert [one["dispatched"] for one in engine_rows(status(), (0, 0), decisions, CONFIG, 99.5)] == [30, 30]
    assert summarise_dispatch({}, [], 1.0)["last"] is None


@pytest.mark.parametrize("windowed", [True, False])
def test_expert_map_equals_a_naive_recount(windowed):
    rng = np.random.default_rng(3)
    layers, sources, count, ranks = 3, 2, 8, 4
    counts_LSE = rng.integers(0, 100, (layers, sources, count))
    slots_LE = np.stack([rng.permutation(count) for _ in range(layers)])
    shown = map_experts(
        placement(
            slot_of_expert_LE=slots_LE,
            window_counts_LSE=counts_LSE if windowed else np.zeros_like(counts_LSE),
            total_counts_LSE=counts_LSE + 1000 * windowed,
        ),
        (1, 4, 5),
        ranks,
    )
    assert shown["scope"] == ("last window" if windowed else "since start")
    worst, all_remote = 0.0, 0
    for l in range(layers):
        load_R, remote = [0] * ranks, 0
        for expert in range(count):
            slot, tokens = slots_LE[l, expert], counts_LSE[l, :, expert]
            assert shown["expert_LP"][l][slot] == expert
            assert shown["tokens_LP"][l][slot] == tokens.sum()
            rank = slot // (count // ranks)
            load_R[rank] += tokens.sum()
            remote += tokens[1 - rank // (ranks // sources)]
        imbalance = max(load_R) / (sum(load_R) / ranks)
        assert shown["imbalance_L"][l] == pytest.approx(imbalance, abs=1e-4)
        assert shown["remote_L"][l] == pytest.approx(remote / sum(load_R), abs=1e-4)
        if imbalance > worst:
            worst, worst_layer = imbalance, (1, 4, 5)[l]
        all_remote += remote
    assert shown["worst_layer"] == worst_layer
    assert shown["imbalance"] == pytest.approx(np.mean(shown["imbalance_L"]), abs=1e-3)
    assert shown["remote_share"] == pytest.approx(all_remote / counts_LSE.sum())
    json.dumps(shown)


def test_experts_without_any_traffic():
    nothing = np.zeros((2, 2, 4), np.int64)
    shown = map_experts(placement(window_counts_LSE=nothing, total_counts_LSE=nothing), (0, 1), 4)
    assert (shown["imbalance"], shown["remote_share"]) == (1.0, 0.0)
    assert shown["tokens_LP"] == [[0] * 4] * 2


def test_placement_decisions_are_newest_first_and_kept_ones_are_merged():
    rng = random.Random(1)
    choices: list[Outcome] = ["kept", "kept", "applied", "failed"]
    outcomes = [rng.choice(choices) for _ in range(100)]
    records = tuple(replace(PLACEMENT, time=float(i), outcome=outcome) for i, outcome in enumerate(outcomes))
    shown = summarise_placement(placement(records=records, totals=PlacementTotals(last_rebalance=90.0)), 100.0)
    decisions = shown["decisions"]
    assert len(decisions) == DECISIONS
    ages = [decision["age_s"] for decision in decisions]
    assert ages == sorted(ages) and ages[0] == 1.0
    unrolled = [decision["outcome"] for decision in decisions for _ in range(decision["times"])]
    assert unrolled == outcomes[::-1][: len(unrolled)]
    assert all(decision["times"] == 1 for decision in decisions if decision["outcome"] != "kept")
    assert not any(a["outcome"] == b["outcome"] == "kept" for a, b in itertools.pairwise(decisions))
    assert shown["imbalance_W"] == [1.5] * 100
    assert shown["changed_age_s"] == 10.0


def test_gains_and_failures_of_placement():
    totals = PlacementTotals(failed_decisions=2, failed_migrations=1, predicted_gain=0.2, achieved_gain=-0.1)
    free = replace(PLACEMENT, cost_before=0.0, cost_after=0.0, reason="r" * 10**5)
    shown = summarise_placement(placement(records=(PLACEMENT, free), totals=totals), 100.0)
    assert [decision["gain"] for decision in shown["decisions"]] == [0.0, pytest.approx(0.2)]
    assert shown["decisions"][0]["reason"] == "r" * TEXT
    assert (shown["failed"], shown["predicted_gain"], shown["achieved_gain"]) == (3, 0.2, -0.1)
    assert shown["changed_age_s"] is None


FAILED = replace(PLACEMENT, outcome="failed", reason="no")


def decided(*records):
    return {"placement": placement(windows_lost=0, records=records)}


WELL = dict(placement=placement(windows_lost=0), traces=traces({}, {}))


@pytest.mark.parametrize(
    ("changes", "outcomes", "words"),
    [
        ({}, {"length": 5, "cancelled": 2}, None),
        ({"state": "failed", "error": "device lost"}, {}, "The engine failed: device lost"),
        ({"traces": ()}, {}, "No engine has published a trace yet"),
        (
            {"traces": traces({}, {}, time=98.9)},
            {},
            "Engines are silent, and their traces count as missing: 0 for 1.1 s",
        ),
        ({"traces": traces({}, {"kv_use": 0.95})}, {}, "The KV cache is nearly full in engine 1 (95%)"),
        (
            decided(PLACEMENT, FAILED),
            {},
            "decision failed: no",
        ),
        (decided(FAILED, PLACEMENT), {}, None),
        ({"steps": replace(status().steps, compiles_after_warmup=3)}, {}, "Compiled 3 times while serving"),
        ({"placement": placement(windows_lost=4)}, {}, "4 traffic windows could not be written"),
        ({}, {"error": 6}, "6 requests ended with an error"),
        ({}, {"refused": 7}, "7 requests were rejected"),
        ({"state": "warming", "traces": ()}, {}, None),
        ({"state": "stopped", "traces": traces({}, {}, time=1.0)}, {}, None),
    ],
)
def test_each_warning_has_its_condition(changes, outcomes, words):
    found = active_warnings(status(**{**WELL, **changes}), Counter(outcomes), CONFIG, 100.0)
    if words is None:
        assert found == []
    else:
        assert len(found) == 1 and words in found[0]
