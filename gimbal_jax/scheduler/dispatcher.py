"""The frontend's memory between dispatch decisions: the latest traces, and the requests that they do not include yet.

Suffix ``_S``: one value per engine.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from gimbal_jax.config import DispatchConfig
from gimbal_jax.scheduler.dispatch import Choose, choose_engine
from gimbal_jax.scheduler.dispatch_decision import Decision, DispatchRecord, View
from gimbal_jax.scheduler.trace import Trace

RECENT_DECISIONS = 1000
"""Number of decisions that a dispatcher keeps."""


@dataclass(eq=False, slots=True)
class Ticket:
    """A dispatched request. Its holder calls ``release`` when the request ends."""

    decision: Decision
    sequence: int
    """Sequence number of the request on its engine, from 1; 0 if it has no engine yet."""
    _on_release: Callable[[], None] | None = None
    """Removes the request from the dispatcher's memory; None if it is not there or no longer."""

    def release(self) -> None:
        """Remove the request from the dispatcher's memory, whether or not a trace included it. May be repeated."""
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()


class Dispatcher:
    """Dispatches requests by the latest traces and by its own memory of what they do not include yet.

    A dispatcher belongs to one thread. Times are seconds on the clock of the traces.

    Attributes:
        recent: The last ``RECENT_DECISIONS`` decisions, oldest first.
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
        """``choose`` may be a rule of your own (see ``choose_engine``). ``draw`` returns numbers uniform in [0, 1)."""
        self.recent: deque[DispatchRecord] = deque(maxlen=RECENT_DECISIONS)
        self._config = config
        self._token_budget = token_budget
        self._choose = choose
        self._draw = draw
        self._no_cache = (0,) * engines
        self._traces: list[Trace | None] = [None] * engines
        # Per engine: compensated tokens by sequence number, ascending, of the live requests that its trace lacks.
        self._unseen_S: list[dict[int, int]] = [{} for _ in range(engines)]
        self._compensation_S = [0] * engines  # the sums of the above
        self._in_flight_S = [0] * engines
        self._picks_S = [0] * engines
        self._picked_tokens_S = [0] * engines
        self._last_sequence_S = [0] * engines
        self._turn = 0
        self._choices = 0

    @property
    def compensation_S(self) -> tuple[int, ...]:
        """Prefill tokens dispatched to each engine that its trace does not include yet. Safe in any thread."""
        return tuple(self._compensation_S)

    def dispatch(
        self,
        request_id: str,
        tokens: int,
        now: float,
        engine: int | None = None,
        cached_tokens_S: tuple[int, ...] | None = None,
    ) -> Ticket:
        """Choose an engine for a prompt of ``tokens``, and compensate for its prefill until a trace includes it.

        ``engine`` is the engine that the user chose, if any. ``cached_tokens_S`` gives the prompt tokens that each
        engine's prefix cache holds, by default none. Under policy ``late`` the ticket has no engine and the dispatcher
        remembers nothing; ``record`` takes the later decision.
        Raises ValueError for an engine that does not exist.
        """
        engines = len(self._traces)
        if engine is not None and not 0 <= engine < engines:
            raise ValueError(f"engine must be in 0..{engines - 1}, not {engine}")

        cached_tokens_S = cached_tokens_S or self._no_cache
        if engine is None:
            decision = self._choose(self.view(now, tokens, cached_tokens_S), self._config, self._token_budget)
            if decision.engine is None:
                return Ticket(decision, 0)
            engine = decision.engine
            self._turn = (engine + 1) % engines
            self._choices += 1
        else:
            decision = Decision(engine, "pinned")

        self._last_sequence_S[engine] += 1
        sequence = self._last_sequence_S[engine]
        uncached = max(0, tokens - cached_tokens_S[engine])
        self._unseen_S[engine][sequence] = uncached
        self._compensation_S[engine] += uncached
        self._in_flight_S[engine] += 1
        self._picks_S[engine] += 1
        self._picked_tokens_S[engine] += tokens
        self.record(request_id, now, decision)
        return Ticket(decision, sequence, partial(self._release, engine, sequence))

    def record(self, request_id: str, now: float, decision: Decision) -> None:
        """Add a decision to ``recent``."""
        self.recent.append(DispatchRecord(request_id, now, decision))

    def observe(self, traces: Iterable[Trace]) -> None:
        """Replace older traces by these, and end the compensation for the requests that they include."""
        for trace in traces:
            engine, known = trace.engine, self._traces[trace.engine]
            if known is not None and trace.time <= known.time:
                continue
            self._traces[engine] = trace
            self._picks_S[engine] = 0
            self._picked_tokens_S[engine] = 0
            for sequence in [sequence for sequence in self._unseen_S[engine] if sequence <= trace.seen]:
                self._compensation_S[engine] -= self._unseen_S[engine].pop(sequence)

    def view(self, now: float, prompt_tokens: int = 0, cached_tokens_S: tuple[int, ...] | None = None) -> View:
        """Return the snapshot that a decision on such a request would depend on."""
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
        """Return the compensation of each engine after ``observe(traces)``, without observing. Safe in any thread."""
        seen = {trace.engine: trace.seen for trace in traces}
        return tuple(
            sum(tokens for sequence, tokens in unseen.copy().items() if sequence > seen.get(engine, 0))
            for engine, unseen in enumerate(self._unseen_S)
        )

    def _release(self, engine: int, sequence: int) -> None:
        self._in_flight_S[engine] -= 1
        self._compensation_S[engine] -= self._unseen_S[engine].pop(sequence, 0)
