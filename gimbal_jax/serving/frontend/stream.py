"""The stream of one sequence: the deltas that its consumer has not taken yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from gimbal_jax.scheduler.dispatcher import Ticket
from gimbal_jax.serving.engine.request import TokenDelta, merge
from gimbal_jax.serving.frontend.record import RequestRecord
from gimbal_jax.serving.text.stops import OutputText


@dataclass(eq=False, slots=True)
class Stream:
    """One sequence: an async iterator over its deltas. The last delta has a finish_reason.

    It holds what its consumer has not taken, at most max_tokens tokens, and gives it out as one delta. It is a context
    manager: leaving the block cancels the sequence if it still runs.
    """

    id: str
    """The core's id of the sequence."""
    record: RequestRecord
    ticket: Ticket
    text: OutputText | None
    """Text of the output, whose stop strings end the sequence; None if deltas need no text."""
    arrived: asyncio.Event
    """Set when there may be something to take. Streams with one consumer may share it."""
    on_leave: Callable[[Stream], None]
    """Function that ends the sequence if it still runs."""
    failure: Exception | None = None
    """Error that ended the sequence; the consumer gets it in place of what it has not taken."""
    _deltas: list[TokenDelta] = field(default_factory=list)
    _is_complete: bool = False
    """Whether the consumer has taken the last delta."""

    def add(self, delta: TokenDelta) -> None:
        """Add a delta of the core, with its text. If a stop string ends there, the delta is cut and has "stop"."""
        if self.text is not None:
            _add_text(delta, self.text)
        self._deltas.append(delta)
        self.arrived.set()

    def fail(self, error: Exception) -> None:
        """End the stream with an error."""
        self.failure = error
        self.arrived.set()

    def take(self) -> TokenDelta | None:
        """Return everything since the last call as one delta; None if there is nothing. Raises the failure."""
        if self.failure is not None:
            raise self.failure
        if not self._deltas:
            return None
        deltas, self._deltas = self._deltas, []
        delta = merge(deltas)
        self._is_complete = delta.finish_reason is not None
        return delta

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenDelta:
        while not self._is_complete:
            await self.arrived.wait()
            self.arrived.clear()
            delta = self.take()
            if delta is not None:
                return delta
        raise StopAsyncIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.on_leave(self)


def _add_text(delta: TokenDelta, text: OutputText) -> None:
    """Set the text of a delta. A stop string may end the output earlier than its tokens do."""
    token_ids = delta.token_ids
    delta.text, count = text.add(token_ids)
    if text.matched is not None:
        delta.token_ids, delta.logprobs = token_ids[:count], delta.logprobs[:count]
        delta.finish_reason, delta.stop = "stop", text.matched
    elif delta.finish_reason is not None:
        delta.text += text.rest()
