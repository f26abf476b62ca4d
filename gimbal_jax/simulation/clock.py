"""Virtual time. It stands still while code runs, and advances when a cost is charged or no work is left."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class VirtualClock:
    """A clock that starts at 0 seconds. Scheduled actions run at their time, even in the middle of a charged step."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()

    @property
    def next_due(self) -> float:
        """Time of the next scheduled action; infinity if there is none."""
        return self._due[0][0] if self._due else float("inf")

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Schedule ``action`` for ``time``, or for now if it is past. Actions of one time run in the order of calls."""
        heapq.heappush(self._due, (max(time, self.now), next(self._serial), action))

    def advance(self, seconds: float) -> None:
        """Advance the clock by ``seconds``, and run the actions that become due."""
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            self.now, _, action = heapq.heappop(self._due)
            action()
        self.now = end


class VirtualExecutor(Executor):
    """An executor that charges ``seconds`` of virtual time for each call.

    If ``blocking``, the time passes inside ``submit``, as if the engines waited. Otherwise the call runs ``seconds``
    later, while the engines go on.
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
