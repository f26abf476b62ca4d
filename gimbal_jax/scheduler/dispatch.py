"""Which engine gets a request: Gimbal's rule (paper 4.2 and 4.3, algorithm 1), and the choice of a rule by policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gimbal_jax.config import DispatchConfig, DispatchPolicy
from gimbal_jax.scheduler import dispatch_peers as peers
from gimbal_jax.scheduler.dispatch_decision import Decision, View, least, sum_S
from gimbal_jax.scheduler.trace import Trace

Choose = Callable[[View, DispatchConfig, int], Decision]
"""A dispatch rule, with the arguments of ``choose_engine``."""


def choose_engine(view: View, config: DispatchConfig, token_budget: int) -> Decision:
    """Choose an engine by ``config.policy``.

    ``token_budget`` is the number of tokens of one step, T_ref in Gimbal's score.
    """
    return _POLICIES[config.policy](view, config, token_budget)


def gimbal_terms(
    traces: Sequence[Trace], compensation_S: tuple[int, ...], config: DispatchConfig, token_budget: int
) -> dict[str, tuple[float, ...]]:
    """Return the summands of Gimbal's score in tokens, from one trace per engine (paper 4.2).

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
    """Decide by algorithm 1: the first of its rules that applies, in the order of docs/scheduling.md."""
    traces = [trace for trace in view.traces if trace is not None]
    guarded = _without_traces(view, traces, config) or _kv_guard(view, traces, config)
    if guarded is not None:
        return guarded
    terms = _score_terms(view, traces, config, token_budget)
    scores_S = sum_S(terms)
    close = _close(view, terms, scores_S, config.close_scores * token_budget)
    return close or Decision(least(scores_S, view.turn), "least_score", terms)


def _without_traces(view: View, traces: Sequence[Trace], config: DispatchConfig) -> Decision | None:
    """Round-robin if the trace of any engine is missing or too old."""
    if len(traces) < len(view.traces):
        return Decision(view.turn, "missing")
    if view.now - min([trace.time for trace in traces]) > config.trace_max_age_s:
        return Decision(view.turn, "stale")
    return None


def _kv_guard(view: View, traces: Sequence[Trace], config: DispatchConfig) -> Decision | None:
    """The engine with the emptiest KV cache, if the fullest is nearly full and the two are far enough apart."""
    kv_S = tuple([trace.kv_use for trace in traces])
    fullest = max(kv_S)
    if fullest > config.high_kv and fullest - min(kv_S) > config.kv_gap:
        return Decision(least(kv_S, view.turn), "kv_guard", {"kv_use": kv_S})
    return None


def _score_terms(
    view: View, traces: Sequence[Trace], config: DispatchConfig, token_budget: int
) -> dict[str, tuple[float, ...]]:
    """The paper's terms. If any prefix cache holds a part of the prompt, also the request's own prefill (ours)."""
    terms = gimbal_terms(traces, view.compensation_S, config, token_budget)
    if any(view.cached_tokens_S):
        # A cached prefix does not attract requests to an engine whose KV cache is nearly full.
        cached_S = [
            cached if trace.kv_use <= config.high_kv else 0
            for cached, trace in zip(view.cached_tokens_S, traces, strict=True)
        ]
        terms["uncached"] = tuple([max(1, view.prompt_tokens - cached) for cached in cached_S])
    return terms


def _close(
    view: View, terms: dict[str, tuple[float, ...]], scores_S: tuple[float, ...], margin: float
) -> Decision | None:
    """Round-robin if all scores lie within ``margin`` tokens.

    If the request's own prefill differs between engines, the least score decides in spite of that (ours): the tokens
    that a cached prefix saves are certain, while the other terms are noisy.
    """
    if max(scores_S) - min(scores_S) > margin:
        return None
    if len(set(terms.get("uncached", ()))) > 1:
        return Decision(least(scores_S, view.turn), "cached", terms)
    return Decision(view.turn, "close", terms)


def _late(view: View, config: DispatchConfig, token_budget: int) -> Decision:
    """No engine yet (ours): ``scheduler.late.bind`` chooses one when an engine has room."""
    return Decision(None, "late")


_POLICIES: dict[DispatchPolicy, Choose] = {
    "gimbal": _gimbal,
    "late": _late,
    "round_robin": peers.round_robin,
    "power_of_two": peers.power_of_two,
    "vllm_classic": peers.vllm_classic,
    "vllm_0_33": peers.vllm_0_33,
    "sglang_total_tokens": peers.sglang_total_tokens,
    "tpu_inference": peers.tpu_inference,
}
