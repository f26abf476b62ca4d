"""The pages that the engines' prefix caches hold, as far as the frontend knows, and a log of their last changes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gimbal_jax.serving.engine.pages import CacheEvents, StoredPage

LOG_TICKS = 10_000
"""Maximum number of changes in the log, one for each tick with changes; vLLM's number."""
LOG_PAGES = 4096
"""Maximum number of pages in all changes of the log, which bounds its memory: a page contains its tokens."""


class PrefixIndex:
    """The pages that each engine's prefix cache held at the last tick. Belongs to one thread."""

    def __init__(self, engines: int) -> None:
        self._pages_S: list[dict[bytes, StoredPage]] = [{} for _ in range(engines)]

    @property
    def pages(self) -> int:
        """Number of pages, in all engines together."""
        return sum(map(len, self._pages_S))

    def apply(self, news: CacheEvents) -> None:
        """Apply the changes of one engine in one tick."""
        pages = self._pages_S[news.engine]
        for removed in news.removed:
            pages.pop(removed, None)
        for page in news.stored:
            pages[page.hash] = page

    def cached_tokens_S(self, hashes: Sequence[bytes], page_size: int) -> tuple[int, ...]:
        """Return the number of prefix tokens that each engine holds, of a prompt with these page hashes."""
        return tuple([page_size * _run(hashes, pages) for pages in self._pages_S])

    def snapshot(self, engine: int) -> list[StoredPage]:
        """Return all pages of an engine, each after its parent."""
        pages = self._pages_S[engine]
        listed: dict[bytes, StoredPage] = {}
        for page in pages.values():
            chain = []
            known: StoredPage | None = page
            while known is not None and known.hash not in listed:
                chain.append(known)
                known = pages.get(known.parent)
            listed.update((one.hash, one) for one in reversed(chain))
        return list(listed.values())


def _run(hashes: Sequence[bytes], pages: dict[bytes, StoredPage]) -> int:
    """Return the number of hashes before the first that is not held."""
    for count, one in enumerate(hashes):
        if one not in pages:
            return count
    return len(hashes)


@dataclass(frozen=True)
class Change:
    """Changes of all prefix caches in one tick."""

    number: int
    """Number of the change, from 1, without gaps."""
    time: float
    """Time when the frontend received the change, in seconds on its clock."""
    news: tuple[CacheEvents, ...]
    """Changes of each engine that has any."""

    @property
    def pages(self) -> int:
        """Number of stored and removed pages."""
        return sum(len(one.stored) + len(one.removed) for one in self.news)


class PageLog:
    """The last changes, for readers of different speed. A reader that is too slow misses changes.

    Belongs to one event loop.

    Attributes:
        last: Number of the newest change; 0 before the first.
        closed: Whether there will be no more changes.
    """

    def __init__(self) -> None:
        self.last = 0
        self.closed = False
        self._changes: deque[Change] = deque()
        self._pages = 0
        self._changed = asyncio.Event()

    @property
    def oldest(self) -> int:
        """Number of the oldest change in the log; ``last`` + 1 if the log is empty."""
        return self.last + 1 - len(self._changes)

    def add(self, time: float, news: Sequence[CacheEvents]) -> None:
        """Append a change, and delete old ones beyond the limits."""
        self.last += 1
        change = Change(self.last, time, tuple(news))
        self._changes.append(change)
        self._pages += change.pages
        while len(self._changes) > 1 and (len(self._changes) > LOG_TICKS or self._pages > LOG_PAGES):
            self._pages -= self._changes.popleft().pages
        self._wake()

    def after(self, number: int) -> list[Change] | None:
        """Return the changes after ``number``, oldest first; None if the log lacks some or ``number`` is unknown."""
        count = self.last - number
        if not 0 <= count <= len(self._changes):
            return None
        return [self._changes[place] for place in range(len(self._changes) - count, len(self._changes))]

    async def changed(self) -> None:
        """Wait for the next change, or for ``close``."""
        if not self.closed:
            await self._changed.wait()

    def close(self) -> None:
        """Wake all readers for the last time."""
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
