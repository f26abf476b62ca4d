"""Gimbal's own rule, and what all policies owe."""

import math
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.config import DispatchConfig, DispatchPolicy
from gimbal_jax.scheduler.dispatch import choose_engine
from gimbal_jax.scheduler.dispatch_decision import Decision, least
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


def test_explain_shows_the_rule_and_the_nonzero_terms():
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


def test_expert_pressure_alone_changes_the_choice():
    state = view(trace(expert_pressure=4.0), trace(expert_pressure=1.0), turn=0)
    assert choose_engine(state, GIMBAL, BUDGET).engine == 1
    blind = choose_engine(state, replace(GIMBAL, lambda_moe=0.0), BUDGET)
    assert (blind.engine, blind.rule, blind.scores_S) == (0, "close", (0.0, 0.0))


def test_close_scores_are_dispatched_round_robin():
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


def test_missing_or_old_traces_are_not_idle_engines():
    busy = trace(waiting_prefill_tokens=10**6)
    assert choose_engine(view(busy, None, turn=0), GIMBAL, BUDGET) == Decision(0, "missing")
    assert choose_engine(view(busy, None, turn=1), GIMBAL, BUDGET) == Decision(1, "missing")
    assert choose_engine(view(busy, trace(), turn=0, now=1.001), GIMBAL, BUDGET) == Decision(0, "stale")
    assert choose_engine(view(busy, trace(), turn=0, now=1.0), GIMBAL, BUDGET).rule == "least_score"
    one_is_fresh = view(trace(time=1.0), replace(busy, time=0.5), now=1.501)
    assert choose_engine(one_is_fresh, GIMBAL, BUDGET).rule == "stale"


def test_ties_start_at_the_turn():
    busy, idle = trace(waiting_prefill_tokens=10**6), trace()
    chosen = [choose_engine(view(busy, idle, idle, turn=turn), GIMBAL, BUDGET).engine for turn in range(3)]
    assert chosen == [1, 1, 2]
    full, free = trace(kv_use=0.95), trace(kv_use=0.1)
    chosen = [choose_engine(view(free, full, free, turn=turn), GIMBAL, BUDGET).engine for turn in range(3)]
    assert chosen == [0, 2, 2]


def test_cached_prefix_counts_as_the_work_that_it_saves():
    state = view(trace(waiting_prefill_tokens=90), trace(), prompt_tokens=128, cached_tokens_S=(96, 0), turn=1)
    decision = choose_engine(state, GIMBAL, BUDGET)
    assert (decision.engine, decision.rule, decision.terms["uncached"]) == (0, "cached", (32, 128))
    assert decision.scores_S == (122, 128)  # close, but the request itself makes a difference
    busier = replace(state, traces=(trace(waiting_prefill_tokens=97), trace(1)))
    assert choose_engine(busier, GIMBAL, BUDGET).engine == 1
    long = view(trace(waiting_prefill_tokens=500), trace(), prompt_tokens=2000, cached_tokens_S=(1600, 0))
    assert (choose_engine(long, GIMBAL, BUDGET).engine, choose_engine(long, GIMBAL, BUDGET).rule) == (0, "least_score")
    everywhere = replace(state, cached_tokens_S=(96, 96))
    assert (choose_engine(everywhere, GIMBAL, BUDGET).engine, choose_engine(everywhere, GIMBAL, BUDGET).rule) == (
        1,
        "close",
    )


def test_cached_prefix_on_a_nearly_full_engine_does_not_count():
    hit = {"prompt_tokens": 2000, "cached_tokens_S": (1984, 0)}
    assert choose_engine(view(trace(kv_use=0.90), trace(kv_use=0.85), **hit), GIMBAL, BUDGET).engine == 0
    for others, rule in [(0.5, "kv_guard"), (0.85, "close")]:
        decision = choose_engine(view(trace(kv_use=0.91), trace(kv_use=others), **hit, turn=1), GIMBAL, BUDGET)
        assert (decision.engine, decision.rule) == (1, rule)


@st.composite
def equal_but_for_the_cache(draw):
    """A view of engines with the same load, whose caches hold different parts of the prompt."""
    engines = draw(st.integers(2, 5))
    busy = trace(waiting_prefill_tokens=draw(st.integers(0, 5000)), kv_use=draw(st.floats(0, 0.9)))
    prompt = draw(st.integers(2, 4000))
    lengths = st.sampled_from([0, prompt // 3, prompt - 1])  # often the same
    cached_S = tuple(draw(st.lists(lengths, min_size=engines, max_size=engines)))
    turn = draw(st.integers(0, engines - 1))
    return view(*[busy] * engines, prompt_tokens=prompt, cached_tokens_S=cached_S, turn=turn)


@given(equal_but_for_the_cache())
def test_among_equal_engines_the_longest_cached_prefix_wins(state):
    cached_S = state.cached_tokens_S
    order = [(state.turn + i) % len(cached_S) for i in range(len(cached_S))]
    assert choose_engine(state, GIMBAL, BUDGET).engine == max(order, key=lambda engine: cached_S[engine])


@given(any_view(), st.integers(0, 4), st.integers(1, 10**5))
def test_cached_prefix_never_outweighs_more_work_than_it_saves(state, engine, hit):
    engine %= len(state.traces)
    without = replace(state, cached_tokens_S=(0,) * len(state.traces))
    cached_S = tuple(hit if s == engine else 0 for s in range(len(state.traces)))
    decision = choose_engine(replace(state, cached_tokens_S=cached_S), GIMBAL, BUDGET)
    before = choose_engine(without, GIMBAL, BUDGET)
    if before.rule not in ("close", "least_score"):
        assert decision == before  # the guard, and the fallbacks
    elif decision.engine == engine != before.engine:
        assert before.scores_S[engine] - min(before.scores_S) <= min(hit, state.prompt_tokens - 1) + 1e-6
        trace = state.traces[engine]
        assert trace is not None and trace.kv_use <= GIMBAL.high_kv


@pytest.mark.parametrize("policy", sorted({*get_args(DispatchPolicy)} - {"tpu_inference"}))
@given(state=any_view(), prompt_tokens=st.integers(1, 10**5))
def test_without_cached_tokens_the_prompt_length_changes_no_decision(policy, state, prompt_tokens):
    """Only tpu-inference's rule counted it before; nothing was cached for it to differ by."""
    nothing = replace(state, cached_tokens_S=(0,) * len(state.traces))
    config = DispatchConfig(policy=policy)
    decision = choose_engine(replace(nothing, prompt_tokens=prompt_tokens), config, BUDGET)
    assert decision == choose_engine(nothing, config, BUDGET)
    assert "uncached" not in decision.terms


@pytest.mark.parametrize("policy", sorted({*get_args(DispatchPolicy)} - {"gimbal", "tpu_inference"}))
@given(state=any_view())
def test_other_policies_ignore_cached_tokens(policy, state):
    config, nothing = DispatchConfig(policy=policy), (0,) * len(state.traces)
    assert choose_engine(state, config, BUDGET) == choose_engine(
        replace(state, cached_tokens_S=nothing), config, BUDGET
    )


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.data())
def test_least_returns_the_first_minimum_from_the_start_on(values, data):
    start = data.draw(st.integers(0, len(values) - 1))
    order = [*range(start, len(values)), *range(start)]
    assert least(values, start) == min(order, key=lambda engine: values[engine])


@pytest.mark.parametrize("policy", get_args(DispatchPolicy))
@given(state=any_view())
def test_every_policy_decides_for_any_view(policy, state):
    decision = choose_engine(state, DispatchConfig(policy=policy), BUDGET)
    if policy == "late":
        assert decision == Decision(None, "late")
        return
    assert decision.engine is not None and 0 <= decision.engine < len(state.traces)
    assert all(len(values_S) == len(state.traces) for values_S in decision.terms.values())
    scores_S = decision.scores_S
    if scores_S and decision.rule != "close":
        assert scores_S[decision.engine] == min(scores_S) < math.inf
