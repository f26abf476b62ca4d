"""Virtual time: it stands still while code runs, and moves when a cost is charged or nothing is left to do."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class VirtualClock:
    """Seconds from 0. What was asked for at a time happens then, also in the middle of a step that is charged."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()

    @property
    def next_due(self) -> float:
        """When something happens next; infinity if nothing does."""
        return self._due[0][0] if self._due else float("inf")

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Call ``action`` when the clock gets to ``time``; actions of one time in the order of the calls."""
        heapq.heappush(self._due, (max(time, self.now), next(self._serial), action))

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass, and what is due in them happen."""
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            self.now, _, action = heapq.heappop(self._due)
            action()
        self.now = end


class VirtualExecutor(Executor):
    """Runs a decision at once, and lets it take its time on the clock.

    ``blocking``: time passes in ``submit``, as where engines stop for it; else the result is there that much later.
    """

    def __init__(self, clock: VirtualClock, seconds: float, blocking: bool) -> None:
        self._clock, self._seconds, self._blocking = clock, seconds, blocking

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def finish() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        if self._blocking:
            self._clock.advance(self._seconds)
            finish()
        else:
            self._clock.at(self._clock.now + self._seconds, finish)
        return future
