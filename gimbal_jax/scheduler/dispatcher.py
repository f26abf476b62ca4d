"""The frontend's memory between dispatch decisions: latest traces, and what they do not show yet."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gimbal_jax.config import DispatchConfig
from gimbal_jax.scheduler.dispatch import Choose, Decision, DispatchRecord, View, choose_engine
from gimbal_jax.scheduler.trace import Trace

RECENT_DECISIONS = 1000


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A dispatched request that has not ended."""

    engine: int
    sequence: int
    tokens: int
    """Prefill tokens that compensation counts until a trace shows the request."""


class Dispatcher:
    """Dispatches requests from the latest traces and its own memory of what they do not show yet.

    Belongs to one thread. Times are seconds on the clock of the traces; ``draw`` is uniform in [0, 1).
    """

    def __init__(
        self,
        engines: int,
        config: DispatchConfig,
        token_budget: int,
        *,
        choose: Choose = choose_engine,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """``choose`` may be a policy of your own, see ``choose_engine``."""
        self._config = config
        self._token_budget = token_budget
        self._choose = choose
        self._draw = draw
        self._traces: list[Trace | None] = [None] * engines
        self._no_cache = (0,) * engines
        self._in_flight: dict[str, _InFlight] = {}
        self._unseen_S: list[dict[str, _InFlight]] = [{} for _ in range(engines)]
        """Those of them that the engine's trace does not show, by rising sequence number."""
        self._compensation_S = [0] * engines
        self._in_flight_S = [0] * engines
        self._picks_S = [0] * engines
        self._picked_tokens_S = [0] * engines
        self._last_sequence_S = [0] * engines
        self._turn = 0
        self._choices = 0
        self.recent: deque[DispatchRecord] = deque(maxlen=RECENT_DECISIONS)
        """The last decisions, oldest first."""

    @property
    def compensation_S(self) -> tuple[int, ...]:
        """Prefill tokens dispatched to each engine that its trace does not show yet. For any thread."""
        return tuple(self._compensation_S)

    def dispatch(
        self,
        request_id: str,
        tokens: int,
        now: float,
        engine: int | None = None,
        cached_tokens_S: tuple[int, ...] | None = None,
    ) -> tuple[Decision, int]:
        """Decide on a prompt of ``tokens``, and remember its prefill until the engine's trace shows it.

        ``engine`` is the user's own choice. ``cached_tokens_S`` says how much of the prompt each
        engine's prefix cache holds, nothing by default.
        Returns the decision and the request's sequence number on its engine, from 1; 0 where there is no engine
        yet: then nothing is remembered, and ``record`` takes in the decision that follows. Raises ValueError for
        an engine that does not exist or a request id that is already under way.
        """
        engines = len(self._traces)
        if engine is not None and not 0 <= engine < engines:
            raise ValueError(f"engine must be in 0..{engines - 1}, not {engine}")
        if request_id in self._in_flight:
            raise ValueError(f"request_id {request_id!r} is already under way")

        cached_tokens_S = cached_tokens_S or self._no_cache
        if engine is None:
            decision = self._choose(self.view(now, tokens, cached_tokens_S), self._config, self._token_budget)
            if decision.engine is None:
                return decision, 0
            engine = decision.engine
            self._turn = (engine + 1) % engines
            self._choices += 1
        else:
            decision = Decision(engine, "pinned")

        self._last_sequence_S[engine] += 1
        sequence = self._last_sequence_S[engine]
        request = _InFlight(engine, sequence, max(0, tokens - cached_tokens_S[engine]))
        self._in_flight[request_id] = self._unseen_S[engine][request_id] = request
        self._compensation_S[engine] += request.tokens
        self._in_flight_S[engine] += 1
        self._picks_S[engine] += 1
        self._picked_tokens_S[engine] += tokens
        self.record(request_id, now, decision)
        return decision, sequence

    def record(self, request_id: str, now: float, decision: Decision) -> None:
        """Keep a decision among the recent ones."""
        self.recent.append(DispatchRecord(request_id, now, decision))

    def observe(self, traces: Iterable[Trace]) -> None:
        """Take in traces that are newer than the ones known; release what they show."""
        for trace in traces:
            engine, known = trace.engine, self._traces[trace.engine]
            if known is not None and trace.time <= known.time:
                continue
            self._traces[engine] = trace
            self._picks_S[engine] = self._picked_tokens_S[engine] = 0
            unseen = self._unseen_S[engine]
            for request_id in [request_id for request_id, request in unseen.items() if request.sequence <= trace.seen]:
                self._compensation_S[engine] -= unseen.pop(request_id).tokens

    def finished(self, request_id: str) -> None:
        """Forget a request that ended, whether or not a trace ever showed it."""
        request = self._in_flight.pop(request_id, None)
        if request is None:
            return
        self._in_flight_S[request.engine] -= 1
        if self._unseen_S[request.engine].pop(request_id, None):
            self._compensation_S[request.engine] -= request.tokens

    def view(
        self,
        now: float,
        prompt_tokens: int = 0,
        cached_tokens_S: tuple[int, ...] | None = None,
    ) -> View:
        """What a decision on such a request would be based on."""
        return View(
            traces=tuple(self._traces),
            compensation_S=tuple(self._compensation_S),
            picks_S=tuple(self._picks_S),
            picked_tokens_S=tuple(self._picked_tokens_S),
            in_flight_S=tuple(self._in_flight_S),
            turn=self._turn,
            choices=self._choices,
            now=now,
            prompt_tokens=prompt_tokens,
            cached_tokens_S=cached_tokens_S or self._no_cache,
            draw=self._draw(),
        )

    def compensation_after(self, traces: Sequence[Trace]) -> tuple[int, ...]:
        """Compensation of each engine once these traces are observed. Changes nothing, and any thread may ask."""
        seen = {trace.engine: trace.seen for trace in traces}
        return tuple(
            sum(request.tokens for request in list(unseen.values()) if request.sequence > seen.get(engine, 0))
            for engine, unseen in enumerate(self._unseen_S)
        )
