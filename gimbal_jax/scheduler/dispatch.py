"""Which engine gets a request (paper 4.2 and 4.3, algorithm 1), and the baselines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from gimbal_jax.config import DispatchConfig, DispatchPolicy
from gimbal_jax.scheduler.trace import Trace

Rule = Literal["missing", "stale", "kv_guard", "close", "least_score", "round_robin", "fewest_requests", "pinned"]

RECENT_DECISIONS = 1000


@dataclass(frozen=True)
class View:
    """All that a dispatch decision may depend on, per engine S."""

    traces: tuple[Trace | None, ...]
    compensation_S: tuple[int, ...]
    """Prefill tokens dispatched to each engine that its trace does not show yet."""
    picks_S: tuple[int, ...]
    """Requests dispatched to each engine since its latest trace arrived."""
    turn: int
    """Engine after the last one chosen; ordered dispatch and ties start there."""
    now: float
    """Seconds, on the clock of the traces."""


@dataclass(frozen=True)
class Decision:
    """The chosen engine, the rule that chose it, and the scores if any were computed."""

    engine: int
    rule: Rule
    scores_S: tuple[float, ...] | None


def choose_engine(view: View, config: DispatchConfig, token_budget: int) -> Decision:
    """Choose by ``config.policy``; ``token_budget`` is one step's tokens, the unit T_ref of the scores."""
    return _POLICIES[config.policy](view, config, token_budget)


def _round_robin(view: View, config: DispatchConfig, token_budget: int) -> Decision:
    return Decision(view.turn, "round_robin", None)


def _vllm_classic(view: View, config: DispatchConfig, token_budget: int) -> Decision:
    """vLLM's rule: least 4 * waiting + running requests, each pick counted as one more waiting.

    Faithful to the original, faults included: an engine without a trace counts as
    empty, however old a trace is it is believed, and ties always go to the lowest engine.
    """
    requests_S = tuple(
        4.0 * ((trace.waiting_requests if trace else 0) + picks) + (trace.running_requests if trace else 0)
        for trace, picks in zip(view.traces, view.picks_S, strict=True)
    )
    return Decision(requests_S.index(min(requests_S)), "fewest_requests", requests_S)


def _gimbal(view: View, config: DispatchConfig, token_budget: int) -> Decision:
    """Algorithm 1: guard the KV cache, else balance a score in tokens; in turn where that says nothing."""
    traces = [trace for trace in view.traces if trace is not None]
    if len(traces) < len(view.traces):
        return Decision(view.turn, "missing", None)
    if any(view.now - trace.time > config.trace_max_age_s for trace in traces):
        return Decision(view.turn, "stale", None)

    kv_S = tuple(trace.kv_use for trace in traces)
    if max(kv_S) > config.high_kv and max(kv_S) - min(kv_S) > config.kv_gap:
        return Decision(_least(kv_S, view.turn), "kv_guard", None)

    scores_S = _scores_S(traces, view.compensation_S, config, token_budget)
    if max(scores_S) - min(scores_S) <= config.close_scores * token_budget:
        return Decision(view.turn, "close", scores_S)
    return Decision(_least(scores_S, view.turn), "least_score", scores_S)


def _scores_S(
    traces: Sequence[Trace], compensation_S: Sequence[int], config: DispatchConfig, token_budget: int
) -> tuple[float, ...]:
    """Pressure of each engine in tokens; the normalisation of the KV and expert terms is ours."""
    mean_pressure = sum(trace.expert_pressure for trace in traces) / len(traces)

    def score(trace: Trace, compensation: int) -> float:
        excess = max(0.0, trace.expert_pressure / mean_pressure - 1.0) if mean_pressure > 0 else 0.0
        prefill = trace.running_prefill_tokens + trace.waiting_prefill_tokens + compensation
        return prefill + token_budget * (config.lambda_kv * trace.kv_use + config.lambda_moe * excess)

    return tuple(score(trace, tokens) for trace, tokens in zip(traces, compensation_S, strict=True))


def _least(values_S: Sequence[float], turn: int) -> int:
    """Engine with the least value; ties go to the first one from ``turn`` on, so that none is favoured."""
    engines = len(values_S)
    return min(range(engines), key=lambda engine: (values_S[engine], (engine - turn) % engines))


_POLICIES: dict[DispatchPolicy, Callable[[View, DispatchConfig, int], Decision]] = {
    "gimbal": _gimbal,
    "round_robin": _round_robin,
    "vllm_classic": _vllm_classic,
}


@dataclass(frozen=True)
class _Unseen:
    """A dispatched request that its engine's trace does not show yet."""

    engine: int
    sequence: int
    tokens: int


class Dispatcher:
    """Dispatches requests from the latest traces and its own memory of what they do not show yet.

    Belongs to one thread. Times are seconds on the clock of the traces.
    """

    def __init__(self, engines: int, config: DispatchConfig, token_budget: int) -> None:
        self._config = config
        self._token_budget = token_budget
        self._traces: list[Trace | None] = [None] * engines
        self._unseen: dict[str, _Unseen] = {}
        self._picks_S = [0] * engines
        self._last_sequence_S = [0] * engines
        self._turn = 0
        self.recent: deque[tuple[str, float, Decision]] = deque(maxlen=RECENT_DECISIONS)
        """The last decisions, oldest first: request id, time, decision."""

    def dispatch(self, request_id: str, tokens: int, now: float, engine: int | None = None) -> tuple[Decision, int]:
        """Decide, and remember ``tokens`` prefill tokens until the engine's trace shows them.

        ``engine`` is the user's own choice. Returns the decision and the request's
        sequence number on its engine, from 1. Raises ValueError for an engine that does
        not exist or a request id that is already under way.
        """
        engines = len(self._traces)
        if engine is not None and not 0 <= engine < engines:
            raise ValueError(f"engine must be in 0..{engines - 1}, not {engine}")
        if request_id in self._unseen:
            raise ValueError(f"request_id {request_id!r} is already under way")

        if engine is None:
            decision = choose_engine(self.view(now), self._config, self._token_budget)
            self._turn = (decision.engine + 1) % engines
        else:
            decision = Decision(engine, "pinned", None)
        self._last_sequence_S[decision.engine] += 1
        self._picks_S[decision.engine] += 1
        sequence = self._last_sequence_S[decision.engine]
        self._unseen[request_id] = _Unseen(decision.engine, sequence, tokens)
        self.recent.append((request_id, now, decision))
        return decision, sequence

    def observe(self, traces: Iterable[Trace]) -> None:
        """Take in traces that are newer than the ones known; release what they show."""
        for trace in traces:
            known = self._traces[trace.engine]
            if known is not None and trace.time <= known.time:
                continue
            self._traces[trace.engine] = trace
            self._picks_S[trace.engine] = 0
            self._unseen = {
                request_id: unseen
                for request_id, unseen in self._unseen.items()
                if unseen.engine != trace.engine or unseen.sequence > trace.seen
            }

    def finished(self, request_id: str) -> None:
        """Forget a request that ended, whether or not a trace ever showed it."""
        self._unseen.pop(request_id, None)

    def view(self, now: float) -> View:
        compensation_S = [0] * len(self._traces)
        for unseen in self._unseen.values():
            compensation_S[unseen.engine] += unseen.tokens
        return View(tuple(self._traces), tuple(compensation_S), tuple(self._picks_S), self._turn, now)
