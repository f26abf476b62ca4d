"""Which engine gets a request: Gimbal's rule (paper 4.2 and 4.3, algorithm 1), and the baselines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add

from gimbal_jax.config import DispatchConfig, DispatchPolicy
from gimbal_jax.scheduler.trace import Trace, idle_trace


@dataclass(frozen=True)
class View:
    """All that a dispatch decision may depend on, per engine S."""

    traces: tuple[Trace | None, ...]
    compensation_S: tuple[int, ...]
    """Prefill tokens dispatched to each engine that its trace does not show yet."""
    picks_S: tuple[int, ...]
    """Requests dispatched to each engine since its latest trace arrived."""
    picked_tokens_S: tuple[int, ...]
    """Their prompt tokens."""
    in_flight_S: tuple[int, ...]
    """Requests dispatched to each engine that have not ended."""
    turn: int
    """Engine after the last one chosen; ordered dispatch and ties start there."""
    choices: int
    """Requests for which an engine was chosen before this one."""
    now: float
    """Seconds, on the clock of the traces."""
    prompt_tokens: int
    """Of the request."""
    cached_tokens_S: tuple[int, ...]
    """Those of them that each engine's prefix cache holds."""
    draw: float
    """Uniform in [0, 1), for rules that use chance."""


@dataclass(frozen=True)
class Decision:
    """The chosen engine, the rule that chose it, and what the rule compared."""

    engine: int | None
    """None: no engine yet (policy ``late``)."""
    rule: str
    """What decided: the guard or the fallback of a policy, or its plain rule; ``pinned`` is the user's choice."""
    terms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Summands of each engine's score, in the unit of the rule; none where the rule needs no scores."""

    @property
    def scores_S(self) -> tuple[float, ...]:
        """Sum of the terms per engine; empty where there are none."""
        return sum_S(self.terms)

    def explain(self) -> str:
        """The decision in words: a line for the rule, then one per engine with its score and the terms in it."""
        choice = "no engine yet" if self.engine is None else f"engine {self.engine}"
        lines = [f"{choice} by {self.rule}"]
        for engine, score in enumerate(self.scores_S):
            terms = [f"{values_S[engine]:g} {name}" for name, values_S in self.terms.items() if values_S[engine]]
            lines.append(f"  engine {engine}: {score:g}" + (f" = {' + '.join(terms)}" if terms else ""))
        return "\n".join(lines)


@dataclass(frozen=True)
class DispatchRecord:
    """One decision, for whom and when."""

    request_id: str
    time: float
    decision: Decision


Choose = Callable[[View, DispatchConfig, int], Decision]
"""A dispatch policy, as ``choose_engine``."""


def choose_engine(view: View, config: DispatchConfig, token_budget: int) -> Decision:
    """Choose by ``config.policy``; ``token_budget`` is one step's tokens, the unit T_ref of Gimbal's score."""
    return _POLICIES[config.policy](view, config, token_budget)


def least[T: (float, tuple[float, float])](values: Sequence[T], start: int) -> int:
    """Engine with the least value; ties go to the first one from ``start`` on, so that none is favoured."""
    smallest, tail = min(values), values[start:]
    return start + tail.index(smallest) if smallest in tail else values.index(smallest)


def sum_S(terms: Mapping[str, tuple[float, ...]]) -> tuple[float, ...]:
    """Sum of the terms per engine; empty without terms."""
    total: Iterable[float] = ()
    for index, values_S in enumerate(terms.values()):
        total = map(add, total, values_S) if index else values_S
    return tuple(total)


def gimbal_terms(
    traces: Sequence[Trace], compensation_S: tuple[int, ...], config: DispatchConfig, token_budget: int
) -> dict[str, tuple[float, ...]]:
    """Summands of Gimbal's score, in tokens, from one trace of every engine (paper 4.2).

    The normalisation of the KV and expert terms is ours.
    """
    kv_weight, moe_weight = config.lambda_kv * token_budget, config.lambda_moe * token_budget
    pressure_S = [trace.expert_pressure for trace in traces]
    mean = sum(pressure_S) / len(traces)
    return {
        "running_prefill": tuple([trace.running_prefill_tokens for trace in traces]),
        "waiting_prefill": tuple([trace.waiting_prefill_tokens for trace in traces]),
        "compensation": compensation_S,
        "kv": tuple([kv_weight * trace.kv_use for trace in traces]),
        "experts": tuple([moe_weight * (q / mean - 1) if q > mean else 0.0 for q in pressure_S]),
    }


def _gimbal(view: View, config: DispatchConfig, token_budget: int) -> Decision:
    """Algorithm 1: guard the KV cache, else balance a score in tokens; in turn where that says nothing.

    Ours: where a prefix cache holds some of the prompt, the request's own prefill belongs to the score, less what is
    cached. If that differs between engines, scores count token for token however close they are: what the request
    itself saves is no noise.
    """
    traces = [trace for trace in view.traces if trace is not None]
    if len(traces) < len(view.traces):
        return Decision(view.turn, "missing")
    if view.now - min([trace.time for trace in traces]) > config.trace_max_age_s:
        return Decision(view.turn, "stale")

    kv_S = tuple([trace.kv_use for trace in traces])
    fullest = max(kv_S)
    if fullest > config.high_kv and fullest - min(kv_S) > config.kv_gap:
        return Decision(least(kv_S, view.turn), "kv_guard", {"kv_use": kv_S})

    terms = gimbal_terms(traces, view.compensation_S, config, token_budget)
    if any(view.cached_tokens_S):
        # An engine whose KV cache is nearly full draws nothing, whatever it holds.
        cached_S = [n if kv <= config.high_kv else 0 for n, kv in zip(view.cached_tokens_S, kv_S, strict=True)]
        terms["uncached"] = tuple([max(1, view.prompt_tokens - cached) for cached in cached_S])
    scores_S = sum_S(terms)
    differ = len(set(terms.get("uncached", ()))) > 1
    if max(scores_S) - min(scores_S) > config.close_scores * token_budget:
        return Decision(least(scores_S, view.turn), "least_score", terms)
    if differ:
        return Decision(least(scores_S, view.turn), "cached", terms)
    return Decision(view.turn, "close", terms)


def _round_robin(view: View, config: DispatchConfig, token_budget: int) -> Decision:
    """SGLang's default: in turn, whatever the engines say."""
    return Decision(view.turn, "round_robin")


def _vllm_classic(view: View, config: DispatchConfig, token_budget: int) -> Decision:
    """vLLM's rule before 0.33: least 4 * waiting + running requests, each pick counted as one more waiting.

    Faithful to the original, faults included: an engine without a trace counts as
    empty, however old a trace is it is believed, a new one erases the picks, and ties
    always go to the lowest engine.
    """
    traces = _believed(view)
    terms = {
        "4 * waiting": tuple(4 * (t.waiting_requests + picks) for t, picks in zip(traces, view.picks_S, strict=True)),
        "running": tuple(t.running_requests for t in traces),
    }
    return Decision(least(sum_S(terms), 0), "fewest_requests", terms)


def _vllm_0_33(view: View, config: DispatchConfig, token_budget: int) -> Decision:
    """vLLM's rule since 0.33: fewest requests, and a penalty for waiting where the KV cache is more than half full.

    max(in flight, waiting + running) + 6 * waiting * max(0, KV use - 0.5); picks count as waiting until
    the next trace, and the scan for the least starts one engine further each time.
    """
    traces = _believed(view)
    waiting_S = tuple(t.waiting_requests + picks for t, picks in zip(traces, view.picks_S, strict=True))
    known = zip(traces, waiting_S, view.in_flight_S, strict=True)
    terms = {
        "requests": tuple(max(in_flight, waiting + t.running_requests) for t, waiting, in_flight in known),
        "kv_penalty": tuple(6 * n * max(0.0, t.kv_use - 0.5) for t, n in zip(traces, waiting_S, strict=True)),
    }
    return Decision(least(sum_S(terms), view.choices % len(traces)), "fewest_requests", terms)


def _sglang_total_tokens(view: View, config: DispatchConfig, token_budget: int) -> Decision:
    """SGLang's ``total_tokens``: least tokens in KV cache and queue, then fewest requests, then the lowest engine.

    A pick adds its prompt and one request until the next trace, which erases both.
    """
    traces = _believed(view)
    terms = {
        "kv_tokens": tuple(t.kv_tokens for t in traces),
        "waiting_tokens": tuple(t.waiting_tokens for t in traces),
        "picked_tokens": view.picked_tokens_S,
    }
    requests = (t.running_requests + t.waiting_requests + picks for t, picks in zip(traces, view.picks_S, strict=True))
    return Decision(least(list(zip(sum_S(terms), requests, strict=True)), 0), "fewest_tokens", terms)


def _tpu_inference(view: View, config: DispatchConfig, token_budget: int) -> Decision:
    """tpu-inference's rule: least pending prefill, the request's own included, then fewest in flight, then the lowest.

    The original asks its engines for every request; here a trace and what it does not show yet stand for the answer.
    """
    traces = _believed(view)
    terms = {
        "running_prefill": tuple(t.running_prefill_tokens for t in traces),
        "waiting_prefill": tuple(t.waiting_prefill_tokens for t in traces),
        "compensation": view.compensation_S,
        "uncached": tuple(max(0, view.prompt_tokens - cached) for cached in view.cached_tokens_S),
    }
    return Decision(least(list(zip(sum_S(terms), view.in_flight_S, strict=True)), 0), "least_prefill", terms)


def _power_of_two(view: View, config: DispatchConfig, token_budget: int) -> Decision:
    """Of two engines drawn at random the one with fewer requests in flight (Mitzenmacher 2001); needs no traces.

    All ordered pairs are equally likely, and of equals the first one is taken.
    """
    engines = len(view.traces)
    if engines == 1:
        return Decision(0, "fewer_of_two", {"in_flight": view.in_flight_S})
    first, second = divmod(int(view.draw * engines * (engines - 1)), engines - 1)
    second += second >= first
    terms = {
        "in_flight": view.in_flight_S,
        "not_drawn": tuple(0 if engine in (first, second) else math.inf for engine in range(engines)),
    }
    return Decision(least(sum_S(terms), first), "fewer_of_two", terms)


def _late(view: View, config: DispatchConfig, token_budget: int) -> Decision:
    """Ours: no engine yet. ``scheduler.late.bind`` chooses when one has room."""
    return Decision(None, "late")


_POLICIES: dict[DispatchPolicy, Callable[[View, DispatchConfig, int], Decision]] = {
    "gimbal": _gimbal,
    "round_robin": _round_robin,
    "vllm_classic": _vllm_classic,
    "vllm_0_33": _vllm_0_33,
    "sglang_total_tokens": _sglang_total_tokens,
    "tpu_inference": _tpu_inference,
    "power_of_two": _power_of_two,
    "late": _late,
}


def _believed(view: View) -> list[Trace]:
    """The traces as the peers' rules take them: an engine that sent none has nothing to do, and none is too old."""
    return [trace or idle_trace(engine) for engine, trace in enumerate(view.traces)]
