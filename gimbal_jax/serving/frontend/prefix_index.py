"""What the frontend knows of the engines' prefix caches: who holds which pages, and the last changes, numbered."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gimbal_jax.serving.engine.pages import CacheEvents, StoredPage

LOG_TICKS = 10_000
"""Changes that the log keeps, a tick's each, as vLLM does."""
LOG_PAGES = 4096
"""Pages in all of them at most: a page comes with its tokens."""


class PrefixIndex:
    """The pages that each engine's prefix cache holds, as far as its news have come. One thread's own.

    It is as large as the caches are.
    """

    def __init__(self, engines: int) -> None:
        self._pages_S: list[dict[bytes, StoredPage]] = [{} for _ in range(engines)]

    @property
    def pages(self) -> int:
        """Held by all engines."""
        return sum(map(len, self._pages_S))

    def apply(self, news: CacheEvents) -> None:
        pages = self._pages_S[news.engine]
        for removed in news.removed:
            pages.pop(removed, None)
        for page in news.stored:
            pages[page.hash] = page

    def cached_tokens_S(self, hashes: Sequence[bytes], page_size: int) -> tuple[int, ...]:
        """Tokens of the longest beginning that each engine holds whole, of a prompt with these page hashes."""
        return tuple([page_size * _run(hashes, pages) for pages in self._pages_S])

    def snapshot(self, engine: int) -> list[StoredPage]:
        """All pages of an engine, each after the page before it."""
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
    for count, one in enumerate(hashes):
        if one not in pages:
            return count
    return len(hashes)


@dataclass(frozen=True)
class Change:
    """All that changed in one tick."""

    number: int
    """From 1, without gaps."""
    time: float
    news: tuple[CacheEvents, ...]
    """At most one of each engine."""

    @property
    def pages(self) -> int:
        return sum(len(one.stored) + len(one.removed) for one in self.news)


class PageLog:
    """The last changes, for readers that each go at their own pace; what is too old for the slowest is gone.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        self.last = 0
        """Number of the newest change; 0 before the first."""
        self.closed = False
        """There will be no more."""
        self._changes: deque[Change] = deque()
        self._pages = 0
        self._changed = asyncio.Event()

    @property
    def oldest(self) -> int:
        """Number of the oldest change that is kept; one more than ``last`` where there is none."""
        return self.last + 1 - len(self._changes)

    def add(self, time: float, news: Sequence[CacheEvents]) -> None:
        self.last += 1
        change = Change(self.last, time, tuple(news))
        self._changes.append(change)
        self._pages += change.pages
        while len(self._changes) > 1 and (len(self._changes) > LOG_TICKS or self._pages > LOG_PAGES):
            self._pages -= self._changes.popleft().pages
        self._wake()

    def after(self, number: int) -> list[Change] | None:
        """The changes after ``number``, oldest first; None where some are gone, or there was no such number yet."""
        count = self.last - number
        if not 0 <= count <= len(self._changes):
            return None
        return [self._changes[place] for place in range(len(self._changes) - count, len(self._changes))]

    async def changed(self) -> None:
        """Wait for the next change, or the end."""
        if not self.closed:
            await self._changed.wait()

    def close(self) -> None:
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
