"""Requests and orders of other threads, kept until the next tick of the engine thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gimbal_jax.exceptions import QueueFull
from gimbal_jax.serving.engine.request import Request


@dataclass(frozen=True)
class Mail:
    """The content of an inbox."""

    requests: Sequence[Request] = ()
    cancelled: Sequence[str] = ()
    """Ids of requests to cancel."""
    flush: bool = False
    """Whether the prefix caches are to be flushed."""


class Inbox:
    """New requests, cancellations and cache flushes from any thread, and the limits of the queues they go to.

    Queue 0 is the central queue of all engines; queue 1 + s belongs to engine s.

    ``changed``: guards the inbox, and is notified of every change. The core guards its state with the same lock, so a
    request is either accepted before the server stops or rejected.
    """

    def __init__(self, engines: int, max_queue: int, late: bool) -> None:
        """``max_queue``: most waiting requests per engine. ``late``: all requests go to the central queue."""
        self.changed = threading.Condition()
        self._engines = engines
        self._max_queue = max_queue
        self._late = late
        self._requests: deque[Request] = deque()
        self._cancelled: deque[str] = deque()
        self._flush = False
        self._waiting = [0] * (1 + engines)  # requests in each queue, or in the inbox on the way to it

    def __bool__(self) -> bool:
        """Return whether there is mail."""
        return bool(self._requests or self._cancelled or self._flush)

    def queue_of(self, request: Request) -> int:
        """Return the queue of a new request. Under ``late`` it is the central one even for a pinned request."""
        return 0 if request.engine is None or self._late else 1 + request.engine

    def put(self, request: Request) -> None:
        """Add a request; raises QueueFull."""
        with self.changed:
            queue, limit = self.queue_of(request), self._max_queue
            if queue == 0 and self._waiting[queue] >= limit * self._engines:
                raise QueueFull(f"{self._waiting[queue]} requests wait ({limit} per engine: max_queue)")
            if queue > 0 and self._waiting[queue] >= limit:
                raise QueueFull(f"engine {request.engine}: {limit} requests wait (max_queue)")
            self._waiting[queue] += 1
            self._requests.append(request)
            self.changed.notify()

    def cancel(self, request_id: str) -> None:
        """Ask for a request to be cancelled."""
        with self.changed:
            self._cancelled.append(request_id)
            self.changed.notify()

    def flush_cache(self) -> None:
        """Ask for the prefix caches to be flushed."""
        with self.changed:
            self._flush = True
            self.changed.notify()

    def take(self) -> Mail:
        """Empty the inbox and return what was in it."""
        with self.changed:
            mail = Mail(self._requests, self._cancelled, self._flush)
            self._requests, self._cancelled, self._flush = deque(), deque(), False
        return mail

    def count_waiting(self, waiting: Sequence[int]) -> None:
        """Set the requests that wait in each queue; those in the inbox are added."""
        with self.changed:
            self._waiting = list(waiting)
            for request in self._requests:
                self._waiting[self.queue_of(request)] += 1
