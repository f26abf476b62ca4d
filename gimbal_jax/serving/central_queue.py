"""The requests that have no engine yet, under the dispatch policy ``late``."""

from __future__ import annotations

from collections.abc import Sequence

from gimbal_jax.config import EngineConfig, QueueConfig
from gimbal_jax.scheduler.dispatch import Decision
from gimbal_jax.scheduler.late import Unbound, bind
from gimbal_jax.scheduler.queue import Job
from gimbal_jax.serving.engine import Engine
from gimbal_jax.serving.request import FinishReason, Output, Request


class CentralQueue:
    """One queue before all engines. Not thread-safe: the engine thread owns it."""

    def __init__(self, engines: Sequence[Engine], config: EngineConfig, queue: QueueConfig) -> None:
        self._engines = engines
        self._config = config
        self._queue = queue
        self._waiting: dict[str, tuple[Request, int]] = {}
        """Each request with the prefill tokens that the engines had processed when it joined."""
        self._turn = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        self._waiting[request.id] = request, self._prefill_tokens

    def cancel(self, request_id: str) -> bool:
        """Forget a request; False if it is not here (any more)."""
        return self._waiting.pop(request_id, None) is not None

    def fail_all(self, reason: str) -> list[Output]:
        """End every request with an error."""
        finish: FinishReason = "error"
        left = [Output(request_id, (), finish_reason=finish, error=reason) for request_id in self._waiting]
        self._waiting.clear()
        return left

    def bind(self, now: float) -> list[tuple[str, Decision]]:
        """Give the engines what their steps have room for; they must be scheduled next, at the same ``now``.

        Returns the ids of the requests whose engine was not the user's choice, with the decisions.
        """
        rooms_S = [engine.room() for engine in self._engines] if self._waiting else []
        if not any(room.free_rows for room in rooms_S):
            return []
        prefill_tokens = self._prefill_tokens
        nothing_cached_S = (0,) * len(self._engines)
        waiting = [
            Unbound(
                request.id,
                Job(request.arrival, len(request.prompt), prefill_tokens - joined, request.priority),
                nothing_cached_S,
                request.engine,
            )
            for request, joined in self._waiting.values()
        ]
        bound = bind(waiting, rooms_S, self._config, self._queue, self._turn, now)
        for unbound, decision in bound:
            assert decision.engine is not None
            request, joined = self._waiting.pop(unbound.id)
            self._engines[decision.engine].add(request, prefill_tokens - joined)
            self._turn = (decision.engine + 1) % len(self._engines)
        return [(unbound.id, decision) for unbound, decision in bound if unbound.engine is None]

    @property
    def _prefill_tokens(self) -> int:
        return sum(engine.prefill_tokens for engine in self._engines)
