"""The peers' dispatch rules, worked by hand, faults included."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.config import DispatchConfig, DispatchPolicy
from gimbal_jax.scheduler.dispatch import choose_engine
from gimbal_jax.scheduler.dispatch_decision import Decision, View
from tests.scheduler.views import BUDGET, trace, view


def choose(policy: DispatchPolicy, state: View) -> Decision:
    return choose_engine(state, DispatchConfig(policy=policy), BUDGET)


def test_round_robin_ignores_state():
    assert choose("round_robin", view(None, trace(kv_use=1.0), turn=1)) == Decision(1, "round_robin")


def test_vllm_classic_weighs_waiting_four_times():
    state = view(trace(waiting_requests=1, running_requests=2), trace(running_requests=7))
    decision = choose("vllm_classic", state)
    assert decision == Decision(0, "fewest_requests", {"4 * waiting": (4, 0), "running": (2, 7)})
    picked = choose("vllm_classic", replace(state, picks_S=(1, 0)))
    assert (picked.engine, picked.scores_S) == (1, (10, 7))


def test_vllm_classic_treats_missing_traces_as_idle_and_breaks_ties_low():
    assert choose("vllm_classic", view(trace(), trace(), turn=1)).engine == 0
    assert choose("vllm_classic", view(trace(running_requests=1), None, now=99.0)).engine == 1


def test_vllm_0_33_penalises_waiting_behind_a_full_cache():
    # engine 0: 2 + 3 requests, none of which waits long: its cache is half full
    # engine 1: 1 + 3 requests, and 6 * 1 * (0.75 - 0.5) for waiting behind a full cache
    # engine 2: nothing that its trace shows, but six in flight
    state = view(
        trace(waiting_requests=2, running_requests=3, kv_use=0.5),
        trace(waiting_requests=1, running_requests=3, kv_use=0.75),
        trace(),
        in_flight_S=(1, 1, 6),
    )
    decision = choose("vllm_0_33", state)
    assert decision == Decision(0, "fewest_requests", {"requests": (5, 4, 6), "kv_penalty": (0, 1.5, 0)})
    # Nobody waits: a full cache costs nothing. One pick, and it does: 5 requests and 6 * 1 * 0.5.
    full = view(trace(running_requests=4, kv_use=1.0), trace(running_requests=5))
    assert choose("vllm_0_33", full).scores_S == (4, 5)
    assert choose("vllm_0_33", replace(full, picks_S=(1, 0))).scores_S == (8, 5)


def test_vllm_0_33_scans_from_one_further_each_time():
    assert [choose("vllm_0_33", view(trace(), trace(), trace(), choices=n)).engine for n in range(4)] == [0, 1, 2, 0]
    assert choose("vllm_0_33", view(trace(running_requests=1), trace(), choices=2)).engine == 1


def test_sglang_counts_tokens_then_requests():
    state = view(
        trace(kv_tokens=100, waiting_tokens=50, running_requests=1),
        trace(kv_tokens=90, waiting_tokens=0, running_requests=9),
        picked_tokens_S=(0, 70),
        picks_S=(0, 1),
    )
    terms = {"kv_tokens": (100, 90), "waiting_tokens": (50, 0), "picked_tokens": (0, 70)}
    assert choose("sglang_total_tokens", state) == Decision(0, "fewest_tokens", terms)
    # equal tokens: fewest requests, picks included, then the lowest engine
    tied = replace(state, picked_tokens_S=(0, 60))
    assert choose("sglang_total_tokens", tied).engine == 0
    assert choose("sglang_total_tokens", replace(tied, picks_S=(10, 1))).engine == 1
    assert choose("sglang_total_tokens", replace(tied, picks_S=(9, 0), turn=1)).engine == 1
    assert choose("sglang_total_tokens", replace(tied, picks_S=(8, 0), turn=1)).engine == 0


def test_tpu_inference_counts_pending_prefill_with_the_own():
    state = view(
        trace(running_prefill_tokens=10, waiting_prefill_tokens=20),
        trace(running_prefill_tokens=70),
        compensation_S=(5, 0),
        prompt_tokens=100,
        cached_tokens_S=(0, 64),
        in_flight_S=(9, 1),
    )
    terms = {
        "running_prefill": (10, 70),
        "waiting_prefill": (20, 0),
        "compensation": (5, 0),
        "uncached": (100, 36),
    }
    assert choose("tpu_inference", state) == Decision(1, "least_prefill", terms)
    # Equal prefill: fewest in flight, whatever the turn; no cache holds less than nothing.
    tied = view(trace(), trace(), prompt_tokens=10, cached_tokens_S=(10, 16), in_flight_S=(1, 0))
    assert choose("tpu_inference", tied).engine == 1
    assert choose("tpu_inference", replace(tied, in_flight_S=(1, 1), turn=1)).engine == 0


def test_power_of_two_takes_the_emptier_of_two():
    # Six ordered pairs of three engines: draws of a sixth each are 01, 02, 10, 12, 20, 21.
    state = view(None, None, None, in_flight_S=(5, 7, 9))
    drawn = [choose("power_of_two", replace(state, draw=(n + 0.5) / 6)) for n in range(6)]
    assert [decision.engine for decision in drawn] == [0, 0, 0, 1, 0, 1]
    inf = float("inf")
    assert [decision.scores_S for decision in drawn[:3]] == [(5, 7, inf), (5, inf, 9), (5, 7, inf)]
    assert choose("power_of_two", replace(state, in_flight_S=(5, 5, 5), draw=0.99)).engine == 2
    assert choose("power_of_two", view(None, draw=0.9)).engine == 0


@given(st.integers(2, 6))
def test_power_of_two_draws_every_ordered_pair_equally(engines):
    pairs = engines * (engines - 1)
    # All are equal, so the first of the pair is taken.
    chosen = Counter(
        choose("power_of_two", view(*[None] * engines, draw=(n + 0.5) / pairs)).engine for n in range(pairs)
    )
    assert chosen == dict.fromkeys(range(engines), engines - 1)
