"""The dispatcher's memory: compensation, sequence numbers, turn, requests in flight."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.config import DispatchConfig
from gimbal_jax.scheduler.dispatch_decision import Decision, DispatchRecord
from gimbal_jax.scheduler.dispatcher import RECENT_DECISIONS, Dispatcher, Ticket
from gimbal_jax.scheduler.trace import idle_trace
from tests.scheduler.views import BUDGET, trace


def fresh(engines: int, **config) -> Dispatcher:
    """A dispatcher that has an idle trace of every engine."""
    dispatcher = Dispatcher(engines, DispatchConfig(**config), BUDGET)
    dispatcher.observe(idle_trace(engine) for engine in range(engines))
    return dispatcher


def test_sequences_count_per_engine_from_one():
    dispatcher = fresh(2, policy="round_robin")
    dispatched = [dispatcher.dispatch(f"r{i}", 10, 0.0) for i in range(4)]
    assert [(ticket.decision.engine, ticket.sequence) for ticket in dispatched] == [(0, 1), (1, 1), (0, 2), (1, 2)]


def test_trace_releases_what_the_engine_has_seen():
    dispatcher = fresh(2, policy="round_robin")
    tickets = [dispatcher.dispatch(f"r{i}", tokens, 0.0) for i, tokens in enumerate([1, 10, 100, 1000])]
    assert dispatcher.view(0.0).compensation_S == (101, 1010)
    dispatcher.observe([trace(0, time=0.1, seen=1, waiting_prefill_tokens=1)])
    assert dispatcher.view(0.1).compensation_S == (100, 1010)
    assert dispatcher.view(0.1).picks_S == (0, 2)
    for _ in range(2):
        tickets[3].release()
        assert dispatcher.view(0.1).compensation_S == (100, 10)


@given(st.permutations(range(5)))
def test_late_traces_never_erase_compensation(order):
    dispatcher = fresh(1)
    for i in range(5):
        dispatcher.dispatch(f"r{i}", 10**i, 0.0)
    newest = -1
    for i in order:
        dispatcher.observe([trace(0, 1.0 + i, seen=i + 1, waiting_requests=i)])
        newest = max(newest, i)
        unseen = sum(10**j for j in range(5) if j > newest)
        assert dispatcher.view(9.0).compensation_S == (unseen,)
        latest = dispatcher.view(9.0).traces[0]
        assert latest is not None and latest.waiting_requests == newest


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 5000)), max_size=20), st.integers(0, 12), st.integers(0, 12)
)
def test_compensation_after_equals_compensation_once_observed(requests, seen, before):
    dispatcher = fresh(2)
    tickets = [dispatcher.dispatch(f"r{i}", tokens, 0.0, engine=engine) for i, (engine, tokens) in enumerate(requests)]
    dispatcher.observe([trace(0, 0.5, seen=min(before, seen))])
    for ticket in tickets[1:2]:
        ticket.release()
    known = dispatcher.view(1.0)
    traces = [trace(0, 1.0, seen=seen), trace(1, 1.0, seen=seen // 2)]
    answer = dispatcher.compensation_after(traces)
    assert dispatcher.compensation_after(()) == known.compensation_S == dispatcher.view(1.0).compensation_S
    dispatcher.observe(traces)
    assert answer == dispatcher.view(1.0).compensation_S


def test_repeated_trace_keeps_the_picks():
    dispatcher = fresh(1, policy="vllm_classic")
    dispatcher.dispatch("a", 10, 0.0)
    dispatcher.observe([idle_trace(0)])
    assert dispatcher.view(0.0).picks_S == (1,)


def test_compensation_counts_tokens_not_requests():
    dispatcher = fresh(2)
    dispatcher.dispatch("long", 4000, 0.0)
    short = [dispatcher.dispatch(f"short{i}", 100, 0.0).decision.engine for i in range(36)]
    assert short == [1] * 36
    classic = fresh(2, policy="vllm_classic")
    tickets = [classic.dispatch(f"r{i}", 4000 if i == 0 else 100, 0.0) for i in range(4)]
    assert [ticket.decision.engine for ticket in tickets] == [0, 1, 0, 1]


@given(
    st.integers(2, 5),
    st.lists(st.integers(1, 5000), min_size=100, max_size=100),
    st.sampled_from([("gimbal", 0.0), ("gimbal", 0.37), ("tpu_inference", 0.0), ("sglang_total_tokens", 0.0)]),
)
def test_burst_of_100_between_two_traces_spreads_by_tokens(engines, sizes, rule):
    policy, close_scores = rule
    dispatcher = fresh(engines, policy=policy, close_scores=close_scores)
    for i, tokens in enumerate(sizes):
        dispatcher.dispatch(f"r{i}", tokens, 0.0)
        compensation_S = dispatcher.view(0.0).compensation_S
        assert max(compensation_S) - min(compensation_S) <= max(sizes) + close_scores * BUDGET
    assert sum(compensation_S) == sum(sizes)


FAIR = ("gimbal", "round_robin", "vllm_classic", "vllm_0_33", "sglang_total_tokens", "tpu_inference")


@given(st.sampled_from(FAIR), st.integers(1, 5), st.integers(1, 5000), st.lists(st.booleans(), max_size=40))
def test_equal_engines_get_equal_load_within_one_request(policy, engines, tokens, traces_come):
    """Whenever the engines report, before the first request or never; the requests wait meanwhile."""
    dispatcher = Dispatcher(engines, DispatchConfig(policy=policy), BUDGET)
    sent_S = [0] * engines
    for i, traces_come_now in enumerate(traces_come):
        if traces_come_now:
            dispatcher.observe(
                trace(
                    engine,
                    0.001 * i,
                    seen=sent,
                    waiting_requests=sent,
                    waiting_prefill_tokens=sent * tokens,
                    waiting_tokens=sent * tokens,
                )
                for engine, sent in enumerate(sent_S)
            )
        ticket = dispatcher.dispatch(f"r{i}", tokens, 0.001 * i)
        assert ticket.decision.engine is not None
        sent_S[ticket.decision.engine] += 1
        assert ticket.sequence == sent_S[ticket.decision.engine]
        assert max(sent_S) - min(sent_S) <= 1


def test_traces_of_one_engine_do_not_affect_another():
    """A fast engine's trace times and sequence numbers say nothing about a slow one's."""
    dispatcher = fresh(2, policy="round_robin")
    for i in range(4):
        dispatcher.dispatch(f"r{i}", 10, 0.0)
    dispatcher.observe([trace(0, time=5.0, seen=2)])
    dispatcher.observe([trace(1, time=0.5, seen=1)])
    assert dispatcher.view(5.0).compensation_S == (0, 10)


def test_pinned_request_is_compensated_but_takes_no_turn():
    dispatcher = fresh(2)
    ticket = dispatcher.dispatch("a", 100, 0.0, engine=1)
    assert (ticket.decision, ticket.sequence) == (Decision(1, "pinned"), 1)
    assert dispatcher.view(0.0).compensation_S == (0, 100)
    assert dispatcher.view(0.0).turn == 0


def test_rejects_unknown_engines_and_changes_nothing():
    dispatcher = fresh(2)
    dispatcher.dispatch("a", 100, 0.0)
    before = replace(dispatcher.view(1.0), draw=0.0)
    with pytest.raises(ValueError, match=r"engine must be in 0\.\.1, not 2"):
        dispatcher.dispatch("b", 100, 0.0, engine=2)
    assert replace(dispatcher.view(1.0), draw=0.0) == before


def test_view_reflects_dispatched_and_ended_requests():
    dispatcher = Dispatcher(2, DispatchConfig(policy="round_robin"), BUDGET, draw=lambda: 0.25)
    ticket = dispatcher.dispatch("a", 100, 0.0, cached_tokens_S=(64, 0))
    dispatcher.dispatch("b", 10, 0.0, engine=0, cached_tokens_S=(16, 0))
    view = dispatcher.view(2.0, 7, (1, 2))
    assert (view.compensation_S, view.picks_S, view.picked_tokens_S) == ((36, 0), (2, 0), (110, 0))
    assert (view.in_flight_S, view.turn, view.choices) == ((2, 0), 1, 1)
    assert (view.now, view.prompt_tokens, view.cached_tokens_S, view.draw) == (2.0, 7, (1, 2), 0.25)
    dispatcher.observe([trace(0, seen=2)])
    view = dispatcher.view(2.0)
    assert (view.compensation_S, view.picks_S, view.picked_tokens_S, view.in_flight_S) == (
        (0, 0),
        (0, 0),
        (0, 0),
        (2, 0),
    )
    for _ in range(2):
        ticket.release()
        assert dispatcher.view(2.0).in_flight_S == (1, 0)


@given(st.lists(st.tuples(st.sampled_from("dfo"), st.integers(0, 9), st.integers(1, 100)), max_size=60))
def test_memory_equals_a_recount_of_the_history(history):
    dispatcher = Dispatcher(3, DispatchConfig(policy="round_robin"), BUDGET)
    live: dict[int, tuple[Ticket, int]] = {}
    last_S, seen_S = [0, 0, 0], [0, 0, 0]
    for now, (event, number, tokens) in enumerate(history):
        if event == "d" and number not in live:
            ticket = dispatcher.dispatch(f"r{number}", tokens, float(now))
            assert ticket.decision.engine is not None
            live[number] = ticket, tokens
            last_S[ticket.decision.engine] = ticket.sequence
        elif event == "f" and number in live:
            live.pop(number)[0].release()
        elif event == "o":
            engine = number % 3
            seen_S[engine] = min(last_S[engine], seen_S[engine] + tokens % 4)
            dispatcher.observe([trace(engine, float(now + 1), seen=seen_S[engine])])
        view = dispatcher.view(float(now))
        for s in range(3):
            mine = [(ticket.sequence, tokens) for ticket, tokens in live.values() if ticket.decision.engine == s]
            assert view.in_flight_S[s] == len(mine)
            assert view.compensation_S[s] == sum(tokens for sequence, tokens in mine if sequence > seen_S[s])


def test_late_requests_have_no_engine_and_are_not_remembered():
    dispatcher = fresh(2, policy="late")
    before = dispatcher.view(0.0)
    ticket = dispatcher.dispatch("a", 100, 0.0)
    assert (ticket.decision, ticket.sequence) == (Decision(None, "late"), 0)
    ticket.release()
    after = dispatcher.view(0.0)
    assert (after.compensation_S, after.picks_S, after.in_flight_S) == (before.compensation_S, (0, 0), (0, 0))
    assert not dispatcher.recent
    dispatcher.record("a", 1.0, Decision(1, "late"))
    assert list(dispatcher.recent) == [DispatchRecord("a", 1.0, Decision(1, "late"))]


def test_custom_rule_replaces_the_policy():
    dispatcher = Dispatcher(3, DispatchConfig(), BUDGET, choose=lambda view, config, budget: Decision(2, "mine"))
    ticket = dispatcher.dispatch("a", 100, 0.0)
    assert (ticket.decision, ticket.sequence) == (Decision(2, "mine"), 1)


def test_recent_keeps_the_last_thousand_decisions():
    dispatcher = fresh(1)
    dispatched = [dispatcher.dispatch(f"r{i}", 1, float(i)) for i in range(RECENT_DECISIONS + 2)]
    assert RECENT_DECISIONS == len(dispatcher.recent) == 1000
    assert (dispatcher.recent[0].request_id, dispatcher.recent[0].time) == ("r2", 2.0)
    assert dispatcher.recent[-1] == DispatchRecord("r1001", 1001.0, dispatched[-1].decision)
