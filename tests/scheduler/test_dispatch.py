"""Gimbal's own rule, and what all policies owe."""

import math
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.config import DispatchConfig, DispatchPolicy
from gimbal_jax.scheduler.dispatch import Decision, choose_engine, least
from tests.scheduler.views import BUDGET, any_view, trace, view

GIMBAL = DispatchConfig()


def test_score_adds_tokens_cache_and_expert_pressure():
    # pressure 3 and 1: the mean is 2, engine 0 is half the mean above it, engine 1 not above
    state = view(
        trace(running_prefill_tokens=100, waiting_prefill_tokens=50, kv_use=0.5, expert_pressure=3.0),
        trace(running_prefill_tokens=200, kv_use=0.1, expert_pressure=1.0),
        compensation_S=(10, 0),
    )
    decision = choose_engine(state, GIMBAL, BUDGET)
    assert decision.terms == {
        "running_prefill": (100, 200),
        "waiting_prefill": (50, 0),
        "compensation": (10, 0),
        "kv": (500, 100),
        "experts": (500, 0),
    }
    assert decision.scores_S == (100 + 50 + 10 + 500 + 500, 200 + 100)
    assert (decision.engine, decision.rule) == (1, "least_score")
    without = replace(GIMBAL, lambda_kv=0.0, lambda_moe=0.0)
    assert choose_engine(state, without, BUDGET).scores_S == (160, 200)


def test_explain_says_the_rule_and_the_terms_that_count():
    state = view(
        trace(waiting_prefill_tokens=600, kv_use=0.1, expert_pressure=3.0), trace(kv_use=0.1, expert_pressure=1.0)
    )
    assert choose_engine(state, GIMBAL, BUDGET).explain() == (
        "engine 1 by least_score\n"
        "  engine 0: 1200 = 600 waiting_prefill + 100 kv + 500 experts\n"
        "  engine 1: 100 = 100 kv"
    )
    assert Decision(0, "close", {"kv": (0.0,)}).explain() == "engine 0 by close\n  engine 0: 0"
    assert Decision(2, "missing").explain() == "engine 2 by missing"
    assert Decision(None, "late").explain() == "no engine yet by late"


def test_expert_pressure_alone_turns_the_choice():
    state = view(trace(expert_pressure=4.0), trace(expert_pressure=1.0), turn=0)
    assert choose_engine(state, GIMBAL, BUDGET).engine == 1
    blind = choose_engine(state, replace(GIMBAL, lambda_moe=0.0), BUDGET)
    assert (blind.engine, blind.rule, blind.scores_S) == (0, "close", (0.0, 0.0))


def test_close_scores_go_in_turn():
    for gap, rule, engine in [(370, "close", 0), (371, "least_score", 1)]:
        state = view(trace(waiting_prefill_tokens=gap), trace())
        decision = choose_engine(state, GIMBAL, BUDGET)
        assert (decision.rule, decision.engine) == (rule, engine)


def test_cache_guard_goes_before_the_score():
    busy_but_empty = trace(kv_use=0.5, waiting_prefill_tokens=10**6)
    guarded = Decision(1, "kv_guard", {"kv_use": (0.91, 0.5)})
    assert choose_engine(view(trace(kv_use=0.91), busy_but_empty), GIMBAL, BUDGET) == guarded
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
    assert choose_engine(view(busy, None, turn=0), GIMBAL, BUDGET) == Decision(0, "missing")
    assert choose_engine(view(busy, None, turn=1), GIMBAL, BUDGET) == Decision(1, "missing")
    assert choose_engine(view(busy, trace(), turn=0, now=1.001), GIMBAL, BUDGET) == Decision(0, "stale")
    assert choose_engine(view(busy, trace(), turn=0, now=1.0), GIMBAL, BUDGET).rule == "least_score"
    one_is_fresh = view(trace(time=1.0), replace(busy, time=0.5), now=1.501)
    assert choose_engine(one_is_fresh, GIMBAL, BUDGET).rule == "stale"


def test_trap_3_ties_start_at_the_turn():
    busy, idle = trace(waiting_prefill_tokens=10**6), trace()
    chosen = [choose_engine(view(busy, idle, idle, turn=turn), GIMBAL, BUDGET).engine for turn in range(3)]
    assert chosen == [1, 1, 2]
    full, free = trace(kv_use=0.95), trace(kv_use=0.1)
    chosen = [choose_engine(view(free, full, free, turn=turn), GIMBAL, BUDGET).engine for turn in range(3)]
    assert chosen == [0, 2, 2]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.data())
def test_least_is_the_first_of_the_least_from_the_start_on(values, data):
    start = data.draw(st.integers(0, len(values) - 1))
    order = [*range(start, len(values)), *range(start)]
    assert least(values, start) == min(order, key=lambda engine: values[engine])


@pytest.mark.parametrize("policy", get_args(DispatchPolicy))
@given(state=any_view())
def test_every_policy_answers_every_view(policy, state):
    decision = choose_engine(state, DispatchConfig(policy=policy), BUDGET)
    if policy == "late":
        assert decision == Decision(None, "late")
        return
    assert decision.engine is not None and 0 <= decision.engine < len(state.traces)
    assert all(len(values_S) == len(state.traces) for values_S in decision.terms.values())
    scores_S = decision.scores_S
    if scores_S and decision.rule != "close":
        assert scores_S[decision.engine] == min(scores_S) < math.inf
