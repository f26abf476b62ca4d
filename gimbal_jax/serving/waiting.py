"""The sequences of one engine that have no row: who of them comes first."""

from __future__ import annotations

import heapq
import math

from gimbal_jax.config import QueueConfig
from gimbal_jax.scheduler.queue import Job, key_until, queue_key
from gimbal_jax.serving.sequence import Sequence


class Waiting:
    """The queue of an engine. ``prefill_tokens`` are those that the engine has processed by now (see ``Job``)."""

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self._sequences: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def ids(self) -> list[str]:
        return list(self._sequences)

    def add(self, sequence: Sequence) -> None:
        sequence.key_until = -math.inf
        self._sequences[sequence.request.id] = sequence

    def pop(self, request_id: str) -> Sequence | None:
        return self._sequences.pop(request_id, None)

    def first(self, most: int, prefill_tokens: int, now: float) -> list[Sequence]:
        """The first ones of the queue, in order, with their ``key`` of now."""
        return heapq.nsmallest(most, self._sequences.values(), key=lambda one: self._key(one, prefill_tokens, now))

    def token_sums(self) -> tuple[int, int]:
        """(what they have to compute, their lengths), added up."""
        sequences = self._sequences.values()
        return sum(one.length - one.cached for one in sequences), sum(one.length for one in sequences)

    def _key(self, sequence: Sequence, prefill_tokens: int, now: float) -> tuple[float, ...]:
        """Its sort key, worked out anew only where it may have changed: queues can be long."""
        if now >= sequence.key_until:
            request, prefill_left = sequence.request, sequence.length - sequence.cached
            job = Job(request.arrival, prefill_left, prefill_tokens - sequence.joined, request.priority)
            sequence.key, sequence.key_until = queue_key(self._config, job, now), key_until(self._config, job, now)
        return sequence.key
