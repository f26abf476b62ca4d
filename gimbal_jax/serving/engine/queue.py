"""The sequences that wait for a row, in the order in which they are to run."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

from gimbal_jax.config import QueueConfig
from gimbal_jax.scheduler.queue import key_until, queue_key
from gimbal_jax.serving.engine.sequence import Sequence


class WaitQueue:
    """The wait queue of an engine, or the central queue of all engines.

    ``prefill_tokens``: tokens that the waiting sequences have to compute before they decode.
    ``tokens``: lengths of the waiting sequences, added up.
    """

    def __init__(self, config: QueueConfig) -> None:
        self.prefill_tokens = 0
        self.tokens = 0
        self._config = config
        self._sequences: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def ids(self) -> list[str]:
        """Return the ids of the waiting requests, in the order in which they joined."""
        return list(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait; its ``cached`` and ``joined`` are set."""
        sequence.key_until = -math.inf
        self._sequences[sequence.request.id] = sequence
        self.prefill_tokens += sequence.length - sequence.cached
        self.tokens += sequence.length

    def pop(self, request_id: str) -> Sequence | None:
        """Remove a sequence and return it; None if it does not wait here."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self.prefill_tokens -= sequence.length - sequence.cached
            self.tokens -= sequence.length
        return sequence

    def first(self, most: int, processed: int, now: float) -> list[Sequence]:
        """Return the first ``most`` sequences of ``in_order``, faster for a long queue."""
        sequences = self._sequences.values()
        return heapq.nsmallest(most, sequences, key=lambda sequence: self._key(sequence, processed, now))

    def in_order(self, processed: int, now: float) -> Iterator[Sequence]:
        """Yield the sequences, first to run first, with their ``key`` of now. Sorts only as far as it is read.

        ``processed``: prefill tokens that the engine or engines have processed since start.
        """
        sequences = self._sequences.values()
        heap = [(self._key(sequence, processed, now), place, sequence) for place, sequence in enumerate(sequences)]
        heapq.heapify(heap)
        while heap:
            yield heapq.heappop(heap)[2]

    def _key(self, sequence: Sequence, processed: int, now: float) -> tuple[float, ...]:
        # Queues can be long, so keys are computed only when they may have changed.
        if now >= sequence.key_until:
            item = sequence.queue_item(sequence.length - sequence.cached, processed)
            sequence.key = queue_key(self._config, item, now)
            sequence.key_until = key_until(self._config, item, now)
        return sequence.key


@dataclass(frozen=True)
class QueueHead:
    """The waiting request that an engine would run first."""

    request_id: str
    """The client's id of the request."""
    waited_s: float
    """Seconds since its arrival, preemptions included."""
    prefill_tokens: int
    """Tokens that it has to compute before its next token is chosen."""
