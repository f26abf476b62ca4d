"""The dispatcher's memory: compensation, sequence numbers, turn."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.config import DispatchConfig
from gimbal_jax.scheduler.dispatch import RECENT_DECISIONS, Dispatcher
from gimbal_jax.scheduler.trace import Trace

BUDGET = 1000
IDLE = Trace(
    engine=0,
    time=0.0,
    seen=0,
    running_prefill_tokens=0,
    waiting_prefill_tokens=0,
    kv_use=0.0,
    expert_pressure=0.0,
    running_requests=0,
    waiting_requests=0,
)


def fresh(engines: int, **config) -> Dispatcher:
    """A dispatcher that has an idle trace of every engine."""
    dispatcher = Dispatcher(engines, DispatchConfig(**config), BUDGET)
    dispatcher.observe(replace(IDLE, engine=engine) for engine in range(engines))
    return dispatcher


def test_sequences_count_per_engine_from_one():
    dispatcher = fresh(2, policy="round_robin")
    dispatched = [dispatcher.dispatch(f"r{i}", 10, 0.0) for i in range(4)]
    assert [(decision.engine, sequence) for decision, sequence in dispatched] == [(0, 1), (1, 1), (0, 2), (1, 2)]


def test_trace_releases_what_the_engine_has_seen():
    dispatcher = fresh(2, policy="round_robin")
    for i, tokens in enumerate([1, 10, 100, 1000]):
        dispatcher.dispatch(f"r{i}", tokens, 0.0)
    assert dispatcher.view(0.0).compensation_S == (101, 1010)
    dispatcher.observe([replace(IDLE, engine=0, time=0.1, seen=1, waiting_prefill_tokens=1)])
    assert dispatcher.view(0.1).compensation_S == (100, 1010)
    assert dispatcher.view(0.1).picks_S == (0, 2)
    dispatcher.finished("r3")
    dispatcher.finished("never heard of")
    assert dispatcher.view(0.1).compensation_S == (100, 10)


@given(st.permutations(range(5)))
def test_trap_2_late_traces_never_erase_compensation(order):
    dispatcher = fresh(1)
    for i in range(5):
        dispatcher.dispatch(f"r{i}", 10**i, 0.0)
    newest = -1
    for i in order:
        dispatcher.observe([replace(IDLE, time=1.0 + i, seen=i + 1, waiting_requests=i)])
        newest = max(newest, i)
        unseen = sum(10**j for j in range(5) if j > newest)
        assert dispatcher.view(9.0).compensation_S == (unseen,)
        latest = dispatcher.view(9.0).traces[0]
        assert latest is not None and latest.waiting_requests == newest


def test_same_trace_again_keeps_the_picks():
    dispatcher = fresh(1, policy="vllm_classic")
    dispatcher.dispatch("a", 10, 0.0)
    dispatcher.observe([IDLE])
    assert dispatcher.view(0.0).picks_S == (1,)


def test_trap_4_compensation_weighs_tokens_not_requests():
    dispatcher = fresh(2)
    dispatcher.dispatch("long", 4000, 0.0)
    short = [dispatcher.dispatch(f"short{i}", 100, 0.0)[0].engine for i in range(36)]
    assert short == [1] * 36
    classic = fresh(2, policy="vllm_classic")
    assert [classic.dispatch(f"r{i}", 4000 if i == 0 else 100, 0.0)[0].engine for i in range(4)] == [0, 1, 0, 1]


@given(st.integers(2, 5), st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.sampled_from([0.0, 0.37]))
def test_burst_between_two_traces_spreads_by_tokens(engines, sizes, close_scores):
    dispatcher = fresh(engines, close_scores=close_scores)
    for i, tokens in enumerate(sizes):
        dispatcher.dispatch(f"r{i}", tokens, 0.0)
        compensation_S = dispatcher.view(0.0).compensation_S
        assert max(compensation_S) - min(compensation_S) <= max(sizes) + close_scores * BUDGET
    assert sum(compensation_S) == sum(sizes)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 5000), st.booleans())
def test_equal_engines_get_equal_load_within_one_request(engines, requests, tokens, traces_come):
    dispatcher = fresh(engines) if traces_come else Dispatcher(engines, DispatchConfig(), BUDGET)
    sequences = [dispatcher.dispatch(f"r{i}", tokens, 0.0) for i in range(requests)]
    picks_S = [sum(decision.engine == engine for decision, _ in sequences) for engine in range(engines)]
    assert max(picks_S) - min(picks_S) <= 1


def test_trap_5_each_engine_has_its_own_clock():
    """A fast engine's trace times and sequence numbers say nothing about a slow one's."""
    dispatcher = fresh(2, policy="round_robin")
    for i in range(4):
        dispatcher.dispatch(f"r{i}", 10, 0.0)
    dispatcher.observe([replace(IDLE, engine=0, time=5.0, seen=2)])
    dispatcher.observe([replace(IDLE, engine=1, time=0.5, seen=1)])
    assert dispatcher.view(5.0).compensation_S == (0, 10)


def test_pinned_request_counts_but_takes_no_turn():
    dispatcher = fresh(2)
    decision, sequence = dispatcher.dispatch("a", 100, 0.0, engine=1)
    assert (decision.engine, decision.rule, sequence) == (1, "pinned", 1)
    assert dispatcher.view(0.0).compensation_S == (0, 100)
    assert dispatcher.view(0.0).turn == 0


def test_refusals_name_what_is_wrong_and_change_nothing():
    dispatcher = fresh(2)
    dispatcher.dispatch("a", 100, 0.0)
    before = dispatcher.view(0.0)
    with pytest.raises(ValueError, match=r"engine must be in 0\.\.1, not 2"):
        dispatcher.dispatch("b", 100, 0.0, engine=2)
    with pytest.raises(ValueError, match="request_id 'a' is already under way"):
        dispatcher.dispatch("a", 100, 0.0)
    assert dispatcher.view(0.0) == before


def test_recent_keeps_the_last_decisions():
    dispatcher = fresh(1)
    dispatched = [dispatcher.dispatch(f"r{i}", 1, float(i)) for i in range(RECENT_DECISIONS + 2)]
    assert RECENT_DECISIONS == len(dispatcher.recent) == 1000
    assert dispatcher.recent[0][:2] == ("r2", 2.0)
    assert dispatcher.recent[-1] == ("r1001", 1001.0, dispatched[-1][0])
