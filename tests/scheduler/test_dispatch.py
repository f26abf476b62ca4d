from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.config import DispatchConfig
from gimbal_jax.scheduler.dispatch import Decision, View, choose_engine
from gimbal_jax.scheduler.trace import Trace

BUDGET = 1000
GIMBAL = DispatchConfig()
CLASSIC = DispatchConfig(policy="vllm_classic")


def trace(engine: int = 0, time: float = 0.0, **fields) -> Trace:
    idle = Trace(
        engine,
        time,
        seen=0,
        running_prefill_tokens=0,
        waiting_prefill_tokens=0,
        kv_use=0.0,
        expert_pressure=0.0,
        running_requests=0,
        waiting_requests=0,
    )
    return replace(idle, **fields)


def view(*traces: Trace | None, compensation=None, picks=None, turn: int = 0, now: float = 0.0) -> View:
    zeros = (0,) * len(traces)
    return View(traces, compensation or zeros, picks or zeros, turn, now)


def test_score_adds_tokens_cache_and_expert_pressure():
    # pressure 3 and 1: the mean is 2, engine 0 is half the mean above it, engine 1 not above
    state = view(
        trace(running_prefill_tokens=100, waiting_prefill_tokens=50, kv_use=0.5, expert_pressure=3.0),
        trace(running_prefill_tokens=200, kv_use=0.1, expert_pressure=1.0),
        compensation=(10, 0),
    )
    decision = choose_engine(state, GIMBAL, BUDGET)
    assert decision.scores_S == pytest.approx((100 + 50 + 10 + 500 + 500, 200 + 100))
    assert (decision.engine, decision.rule) == (1, "least_score")
    without = replace(GIMBAL, lambda_kv=0.0, lambda_moe=0.0)
    assert choose_engine(state, without, BUDGET).scores_S == (160, 200)


def test_expert_pressure_alone_turns_the_choice():
    state = view(trace(expert_pressure=4.0), trace(expert_pressure=1.0), turn=0)
    assert choose_engine(state, GIMBAL, BUDGET).engine == 1
    assert choose_engine(state, replace(GIMBAL, lambda_moe=0.0), BUDGET) == Decision(0, "close", (0.0, 0.0))


def test_close_scores_go_in_turn():
    for gap, rule, engine in [(370, "close", 0), (371, "least_score", 1)]:
        state = view(trace(waiting_prefill_tokens=gap), trace())
        decision = choose_engine(state, GIMBAL, BUDGET)
        assert (decision.rule, decision.engine) == (rule, engine)


def test_cache_guard_goes_before_the_score():
    busy_but_empty = trace(kv_use=0.5, waiting_prefill_tokens=10**6)
    assert choose_engine(view(trace(kv_use=0.91), busy_but_empty), GIMBAL, BUDGET) == Decision(1, "kv_guard", None)
    # neither all full nor all below the limit is a reason to guard
    assert choose_engine(view(trace(kv_use=0.90), busy_but_empty), GIMBAL, BUDGET).engine == 0
    assert choose_engine(view(trace(kv_use=0.95), trace(kv_use=0.90)), GIMBAL, BUDGET).rule == "close"


@given(st.lists(st.floats(0, 1), min_size=2, max_size=5), st.data())
def test_cache_guard_never_picks_the_fullest(kv_S, data):
    turn = data.draw(st.integers(0, len(kv_S) - 1))
    decision = choose_engine(view(*(trace(kv_use=kv) for kv in kv_S), turn=turn), GIMBAL, BUDGET)
    fires = max(kv_S) > 0.90 and max(kv_S) - min(kv_S) > 0.10
    assert (decision.rule == "kv_guard") == fires
    if fires:
        assert kv_S[decision.engine] == min(kv_S) < max(kv_S)


def test_trap_1_absent_or_old_traces_are_not_zeros():
    busy = trace(waiting_prefill_tokens=10**6)
    assert choose_engine(view(busy, None, turn=0), GIMBAL, BUDGET) == Decision(0, "missing", None)
    assert choose_engine(view(busy, None, turn=1), GIMBAL, BUDGET) == Decision(1, "missing", None)
    assert choose_engine(view(busy, trace(), turn=0, now=1.001), GIMBAL, BUDGET) == Decision(0, "stale", None)
    assert choose_engine(view(busy, trace(), turn=0, now=1.0), GIMBAL, BUDGET).rule == "least_score"


def test_trap_3_ties_start_at_the_turn():
    busy, idle = trace(waiting_prefill_tokens=10**6), trace()
    chosen = [choose_engine(view(busy, idle, idle, turn=turn), GIMBAL, BUDGET).engine for turn in range(3)]
    assert chosen == [1, 1, 2]
    full, free = trace(kv_use=0.95), trace(kv_use=0.1)
    chosen = [choose_engine(view(free, full, free, turn=turn), GIMBAL, BUDGET).engine for turn in range(3)]
    assert chosen == [0, 2, 2]


def test_round_robin_ignores_state():
    config = DispatchConfig(policy="round_robin")
    assert choose_engine(view(None, trace(kv_use=1.0), turn=1), config, BUDGET) == Decision(1, "round_robin", None)


def test_vllm_classic_weighs_waiting_four_times():
    state = view(trace(waiting_requests=1, running_requests=2), trace(running_requests=7))
    assert choose_engine(state, CLASSIC, BUDGET) == Decision(0, "fewest_requests", (6.0, 7.0))
    assert choose_engine(replace(state, picks_S=(1, 0)), CLASSIC, BUDGET) == Decision(1, "fewest_requests", (10.0, 7.0))


def test_vllm_classic_has_traps_1_and_3():
    assert choose_engine(view(trace(), trace(), turn=1), CLASSIC, BUDGET).engine == 0
    assert choose_engine(view(trace(running_requests=1), None, now=99.0), CLASSIC, BUDGET).engine == 1
