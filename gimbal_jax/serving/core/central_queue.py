"""The requests that have no engine yet, under the dispatch policy ``late``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gimbal_jax.config import EngineConfig, QueueConfig
from gimbal_jax.scheduler.dispatch_decision import Decision
from gimbal_jax.scheduler.late import PendingRequest, bind_in_order
from gimbal_jax.serving.engine.engine import Engine
from gimbal_jax.serving.engine.queue import WaitQueue
from gimbal_jax.serving.engine.request import FinishReason, Request, TokenDelta, reason_of
from gimbal_jax.serving.engine.sequence import Sequence as WaitingSequence


class CentralQueue:
    """One queue in front of all engines. Not thread-safe; the engine thread owns it.

    A waiting request is sorted with the longest prefix that any engine had cached when it joined.
    """

    def __init__(self, engines: Sequence[Engine], config: EngineConfig, queue: QueueConfig) -> None:
        self._engines = engines
        self._config = config
        self._queue_config = queue
        self._waiting = WaitQueue(queue)
        self._turn = 0  # the engine that wins a tie

    @property
    def waiting(self) -> int:
        """Requests that wait here."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request."""
        cached = max(engine.cached_tokens(request) for engine in self._engines)
        self._waiting.add(WaitingSequence(request, self._processed, cached=cached))

    def cancel(self, request_id: str) -> bool:
        """Remove a request. Returns False if the request is not here, or no longer."""
        return self._waiting.pop(request_id) is not None

    def fail_all(self, reason: str) -> list[TokenDelta]:
        """End every request with an error."""
        finish: FinishReason = "error"
        ids = self._waiting.ids()
        for request_id in ids:
            self._waiting.pop(request_id)
        return [TokenDelta(request_id, (), finish_reason=finish, error=reason) for request_id in ids]

    def bind(self, now: float) -> tuple[list[tuple[str, Decision]], list[TokenDelta]]:
        """Give the engines as many requests as their next steps have room for.

        Call ``schedule`` of the engines next, with the same ``now``. Returns (request id, decision) for the requests
        that were not pinned by their user, and the ends of requests that their engine could not admit.
        """
        capacity_S = [engine.capacity() for engine in self._engines] if self._waiting else []
        if not any(capacity.free_rows for capacity in capacity_S):
            return [], []
        processed = self._processed
        pending = self._in_order(processed, now)
        bound = bind_in_order(pending, capacity_S, self._config, self._queue_config, self._turn, now)
        failed = []
        for chosen, decision in bound:
            sequence = self._waiting.pop(chosen.id)
            assert decision.engine is not None and sequence is not None
            try:
                self._engines[decision.engine].add(sequence.request, processed - sequence.joined)
            except Exception as error:  # an error in one request must not end the others
                failed.append(admission_error(sequence.request, error))
            self._turn = (decision.engine + 1) % len(self._engines)
        return [(chosen.id, decision) for chosen, decision in bound if chosen.engine is None], failed

    def _in_order(self, processed: int, now: float) -> Iterator[tuple[tuple[float, ...], PendingRequest]]:
        """Yield the requests with their sort keys, smallest first."""
        for sequence in self._waiting.in_order(processed, now):
            request = sequence.request
            cached_tokens_S = tuple(engine.cached_tokens(request) for engine in self._engines)
            kept_pages_S = tuple(engine.kept_pages(request) for engine in self._engines) if any(cached_tokens_S) else ()
            item = sequence.queue_item(sequence.length, processed)
            yield sequence.key, PendingRequest(request.id, item, cached_tokens_S, request.engine, kept_pages_S)

    @property
    def _processed(self) -> int:
        """Prefill tokens that all engines have processed since start."""
        return sum(engine.prefill_tokens for engine in self._engines)


def admission_error(request: Request, error: Exception) -> TokenDelta:
    """Return the end of a request that its engine could not admit, for instance because its grammar raised."""
    reason = f"the request could not be admitted: {reason_of(error)}"
    return TokenDelta(request.id, (), finish_reason="error", error=reason)
