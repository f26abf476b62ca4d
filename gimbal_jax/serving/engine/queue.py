"""The sequences of one engine that have no row: who of them comes first."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from gimbal_jax.config import QueueConfig
from gimbal_jax.scheduler.queue import QueueItem, key_until, queue_key
from gimbal_jax.serving.engine.request import RequestId
from gimbal_jax.serving.engine.sequence import Sequence


class Waiting:
    """The queue of an engine. ``prefill_tokens`` are those that the engine has processed by now (see ``QueueItem``)."""

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self._sequences: dict[RequestId, Sequence] = {}
        self.prefill_tokens = 0
        """What they have to compute."""
        self.tokens = 0
        """Their lengths, added up."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._sequences

    def ids(self) -> list[RequestId]:
        return list(self._sequences)

    def add(self, sequence: Sequence) -> None:
        sequence.key_until = -math.inf
        self._sequences[sequence.request.id] = sequence
        self.prefill_tokens += sequence.length - sequence.cached
        self.tokens += sequence.length

    def pop(self, request_id: RequestId) -> Sequence | None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self.prefill_tokens -= sequence.length - sequence.cached
            self.tokens -= sequence.length
        return sequence

    def first(self, most: int, prefill_tokens: int, now: float) -> list[Sequence]:
        """The first ones of the queue, in order, with their ``key`` of now."""
        return heapq.nsmallest(most, self._sequences.values(), key=lambda one: self._key(one, prefill_tokens, now))

    def _key(self, sequence: Sequence, prefill_tokens: int, now: float) -> tuple[float, ...]:
        """Its sort key, worked out anew only where it may have changed: queues can be long."""
        if now >= sequence.key_until:
            request, prefill_left = sequence.request, sequence.length - sequence.cached
            item = QueueItem(request.arrival, prefill_left, prefill_tokens - sequence.joined, request.priority)
            sequence.key, sequence.key_until = queue_key(self._config, item, now), key_until(self._config, item, now)
        return sequence.key


@dataclass(frozen=True)
class QueueHead:
    """The waiting request that an engine would run first."""

    request_id: str
    """The client's id of the request."""
    waited_s: float
    """Since its arrival, preemptions included."""
    prefill_tokens: int
    """Tokens that it has to compute before its next one."""
