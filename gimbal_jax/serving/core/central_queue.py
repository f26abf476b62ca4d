"""The requests that have no engine yet, under the dispatch policy ``late``."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gimbal_jax.config import EngineConfig, QueueConfig
from gimbal_jax.scheduler.dispatch_decision import Decision
from gimbal_jax.scheduler.late import PendingRequest, bind_in_order
from gimbal_jax.scheduler.queue import QueueItem, key_until, queue_key
from gimbal_jax.serving.engine.engine import Engine
from gimbal_jax.serving.engine.request import FinishReason, Request, RequestId, TokenDelta, reason_of


@dataclass(eq=False, slots=True)
class _Waiting:
    request: Request
    joined: int
    """Prefill tokens that the engines had processed when it joined."""
    cached: int
    """Tokens of its beginning that the engine that knew most of it held then."""
    key: tuple[float, ...] = ()
    key_until: float = -math.inf
    """Its sort key in the queue, and when that is no longer sure to hold."""


class CentralQueue:
    """One queue before all engines. Not thread-safe: the engine thread owns it."""

    def __init__(self, engines: Sequence[Engine], config: EngineConfig, queue: QueueConfig) -> None:
        self._engines = engines
        self._config = config
        self._queue = queue
        self._waiting: dict[RequestId, _Waiting] = {}
        self._turn = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        cached = max(engine.cached_tokens(request) for engine in self._engines)
        self._waiting[request.id] = _Waiting(request, self._prefill_tokens, cached)

    def cancel(self, request_id: RequestId) -> bool:
        """Forget a request; False if it is not here (any more)."""
        return self._waiting.pop(request_id, None) is not None

    def fail_all(self, reason: str) -> list[TokenDelta]:
        """End every request with an error."""
        finish: FinishReason = "error"
        left = [TokenDelta(request_id, (), finish_reason=finish, error=reason) for request_id in self._waiting]
        self._waiting.clear()
        return left

    def bind(self, now: float) -> tuple[list[tuple[RequestId, Decision]], list[TokenDelta]]:
        """Give the engines what their steps have room for; they must be scheduled next, at the same ``now``.

        Returns the ids of the requests whose engine was not the user's choice, with the decisions, and how those
        ended that their engine could not take in.
        """
        capacity_S = [engine.capacity() for engine in self._engines] if self._waiting else []
        if not any(room.free_rows for room in capacity_S):
            return [], []
        prefill_tokens = self._prefill_tokens
        in_order = self._in_order(prefill_tokens, now)
        bound = bind_in_order(in_order, capacity_S, self._config, self._queue, self._turn, now)
        failed = []
        for pending, decision in bound:
            assert decision.engine is not None
            waiting = self._waiting.pop(pending.id)
            try:
                self._engines[decision.engine].add(waiting.request, prefill_tokens - waiting.joined)
            except Exception as error:  # one request must not end the others
                failed.append(not_taken_in(waiting.request, error))
            self._turn = (decision.engine + 1) % len(self._engines)
        return [(pending.id, decision) for pending, decision in bound if pending.engine is None], failed

    def _in_order(self, prefill_tokens: int, now: float) -> Iterator[tuple[tuple[float, ...], PendingRequest]]:
        """The requests with their sort keys, smallest first: sorted only as far as they are wanted."""
        heap = [(self._key(one, prefill_tokens, now), place, one) for place, one in enumerate(self._waiting.values())]
        heapq.heapify(heap)
        while heap:
            key, _, one = heapq.heappop(heap)
            request = one.request
            cached_tokens_S = tuple(engine.cached_tokens(request) for engine in self._engines)
            kept_pages_S = tuple(engine.kept_pages(request) for engine in self._engines) if any(cached_tokens_S) else ()
            item = _queue_item(one, prefill_tokens)
            yield key, PendingRequest(request.id, item, cached_tokens_S, request.engine, kept_pages_S)

    def _key(self, one: _Waiting, prefill_tokens: int, now: float) -> tuple[float, ...]:
        """Its sort key, worked out anew only where it may have changed."""
        if now >= one.key_until:
            item = _queue_item(one, prefill_tokens, one.cached)
            one.key, one.key_until = queue_key(self._queue, item, now), key_until(self._queue, item, now)
        return one.key

    @property
    def _prefill_tokens(self) -> int:
        return sum(engine.prefill_tokens for engine in self._engines)


def not_taken_in(request: Request, error: Exception) -> TokenDelta:
    """How a request ends that its engine could not take in, for instance because its grammar raised."""
    reason = f"the request could not be taken in: {reason_of(error)}"
    return TokenDelta(request.id, (), finish_reason="error", error=reason)


def _queue_item(one: _Waiting, prefill_tokens: int, cached: int = 0) -> QueueItem:
    request = one.request
    return QueueItem(request.arrival, len(request.prompt) - cached, prefill_tokens - one.joined, request.priority)
