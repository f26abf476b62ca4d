"""The dispatch rules of other servers and of the literature, as baselines.

The rules of vLLM, SGLang and tpu-inference are faithful to the originals, including their faults. They treat an engine
without a trace as idle and accept a trace of any age.
"""

from __future__ import annotations

import math

from gimbal_jax.config import DispatchConfig
from gimbal_jax.scheduler.dispatch_decision import Decision, View, least, sum_S
from gimbal_jax.scheduler.trace import Trace, idle_trace


def round_robin(view: View, config: DispatchConfig, token_budget: int) -> Decision:
    """Choose the engines in turn, without looking at their state (SGLang's default)."""
    return Decision(view.turn, "round_robin")


def power_of_two(view: View, config: DispatchConfig, token_budget: int) -> Decision:
    """Draw two engines at random and choose the one with fewer requests in flight (Mitzenmacher 2001).

    Needs no traces. All ordered pairs are equally likely, and the first of the pair wins a tie.
    """
    engines = len(view.traces)
    if engines == 1:
        return Decision(0, "fewer_of_two", {"in_flight": view.in_flight_S})
    # The draw is the index of an ordered pair of different engines.
    first, second = divmod(int(view.draw * engines * (engines - 1)), engines - 1)
    second += second >= first
    terms = {
        "in_flight": view.in_flight_S,
        "not_drawn": tuple(0 if engine in (first, second) else math.inf for engine in range(engines)),
    }
    return Decision(least(sum_S(terms), first), "fewer_of_two", terms)


def vllm_classic(view: View, config: DispatchConfig, token_budget: int) -> Decision:
    """Choose the least 4 * waiting + running requests (vLLM before 0.33), where each pick counts as waiting.

    Faults of the original: a new trace erases the picks, and the lowest engine wins every tie.
    """
    traces = _traces_or_idle(view)
    terms = {
        "4 * waiting": tuple(4 * (t.waiting_requests + picks) for t, picks in zip(traces, view.picks_S, strict=True)),
        "running": tuple(t.running_requests for t in traces),
    }
    return Decision(least(sum_S(terms), 0), "fewest_requests", terms)


def vllm_0_33(view: View, config: DispatchConfig, token_budget: int) -> Decision:
    """Choose the fewest requests, with a penalty for waiting if the KV cache is more than half full (vLLM since 0.33).

    The score is max(in flight, waiting + running) + 6 * waiting * max(0, KV use - 0.5). Picks count as waiting until
    the next trace. The scan for the least score starts one engine further each time.
    """
    traces = _traces_or_idle(view)
    waiting_S = tuple(t.waiting_requests + picks for t, picks in zip(traces, view.picks_S, strict=True))
    known = zip(traces, waiting_S, view.in_flight_S, strict=True)
    terms = {
        "requests": tuple(max(in_flight, waiting + t.running_requests) for t, waiting, in_flight in known),
        "kv_penalty": tuple(6 * n * max(0.0, t.kv_use - 0.5) for t, n in zip(traces, waiting_S, strict=True)),
    }
    return Decision(least(sum_S(terms), view.choices % len(traces)), "fewest_requests", terms)


def sglang_total_tokens(view: View, config: DispatchConfig, token_budget: int) -> Decision:
    """Choose the fewest tokens in KV cache and queue, then the fewest requests, then the lowest engine.

    SGLang's ``total_tokens``. A pick adds its prompt and one request until the next trace, which erases both.
    """
    traces = _traces_or_idle(view)
    terms = {
        "kv_tokens": tuple(t.kv_tokens for t in traces),
        "waiting_tokens": tuple(t.waiting_tokens for t in traces),
        "picked_tokens": view.picked_tokens_S,
    }
    requests = (t.running_requests + t.waiting_requests + picks for t, picks in zip(traces, view.picks_S, strict=True))
    return Decision(least(list(zip(sum_S(terms), requests, strict=True)), 0), "fewest_tokens", terms)


def tpu_inference(view: View, config: DispatchConfig, token_budget: int) -> Decision:
    """Choose the least pending prefill including the request's own, then the fewest in flight, then the lowest engine.

    The original asks its engines about every request. Here the trace and the compensation replace the answer.
    """
    traces = _traces_or_idle(view)
    terms = {
        "running_prefill": tuple(t.running_prefill_tokens for t in traces),
        "waiting_prefill": tuple(t.waiting_prefill_tokens for t in traces),
        "compensation": view.compensation_S,
        "uncached": tuple(max(0, view.prompt_tokens - cached) for cached in view.cached_tokens_S),
    }
    return Decision(least(list(zip(sum_S(terms), view.in_flight_S, strict=True)), 0), "least_prefill", terms)


def _traces_or_idle(view: View) -> list[Trace]:
    """Return the latest traces, with an idle one for each engine that has sent none."""
    return [trace or idle_trace(engine) for engine, trace in enumerate(view.traces)]
