"""The KV pages of one engine: which sequences use them, and which content later sequences can share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


class PagePool:
    """Pages 0 to ``num_pages - 1``. A page is free, used by sequences, or kept without users under its name.

    Only a full page gets a name, which is the hash of its content (see ``prefix.page_hashes``), and it is not written
    afterwards. Kept pages are evicted when pages are short, least recently used first, so they count as available.
    """

    def __init__(self, num_pages: int) -> None:
        # Popped from the end, so the page that was freed last is used first.
        self._free = list(range(num_pages - 1, -1, -1))
        self._users = [0] * num_pages
        self._kept: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._stored: dict[bytes, StoredPage] = {}
        self._removed: dict[bytes, None] = {}

    @property
    def available(self) -> int:
        """Pages that ``allocate`` can give."""
        return len(self._free) + len(self._kept)

    @property
    def named(self) -> int:
        """Pages that hold a known prefix, in use or not."""
        return len(self._page_of)

    def match(self, names: Sequence[bytes]) -> list[int]:
        """Return the pages of the longest known prefix of ``names``."""
        pages = []
        for name in names:
            page = self._page_of.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def unused(self, pages: Iterable[int]) -> int:
        """Return how many of these pages ``available`` counts."""
        return sum(page in self._kept for page in pages)

    def take(self, pages: Iterable[int]) -> None:
        """Add one user to pages that ``match`` returned."""
        for page in pages:
            if self._users[page] == 0:
                del self._kept[page]
            self._users[page] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` pages to write to. Returns None and takes nothing if fewer are available."""
        if count > self.available:
            return None
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._kept.popitem(last=False)
                self._remove_name(page)
            self._users[page] = 1
            pages.append(page)
        return pages

    def publish(self, page: int, name: bytes, parent: bytes, tokens: np.ndarray) -> None:
        """Share a full page that is in use from now on. Does nothing if its content is known already.

        ``parent`` is the name of the page before it; empty for the first page of a sequence.
        """
        if name not in self._page_of:
            self._page_of[name], self._name_of[page] = page, name
            self._stored[name] = StoredPage(name, parent, tuple(tokens.tolist()))

    def forget(self, pages: Iterable[int]) -> None:
        """Stop sharing pages whose content is wrong."""
        for page in pages:
            if page in self._name_of:
                self._remove_name(page)
                if page in self._kept:
                    del self._kept[page]
                    self._free.append(page)

    def release(self, pages: Sequence[int]) -> None:
        """Remove one user from the pages of a sequence, given in order. ValueError for a page that is not in use."""
        for page in reversed(pages):  # so that a prefix is kept longer than what continues it
            if not 0 <= page < len(self._users) or self._users[page] == 0:
                raise ValueError(f"page {page} is not in use: freed twice, or never allocated")
            self._users[page] -= 1
            if self._users[page] == 0:
                if page in self._name_of:
                    self._kept[page] = None
                else:
                    self._free.append(page)

    def flush(self) -> None:
        """Evict all pages that no sequence uses."""
        for page in self._kept:
            self._remove_name(page)
        self._free.extend(self._kept)
        self._kept.clear()

    def drain_cache_events(self, engine: int) -> CacheEvents | None:
        """Return what changed since the last call; None if nothing did."""
        if not self._stored and not self._removed:
            return None
        events = CacheEvents(engine, tuple(self._stored.values()), tuple(self._removed))
        self._stored, self._removed = {}, {}
        return events

    def _remove_name(self, page: int) -> None:
        name = self._name_of.pop(page)
        del self._page_of[name]
        # A page that was stored since the last events needs no event at all.
        if self._stored.pop(name, None) is None:
            self._removed[name] = None


@dataclass(frozen=True, eq=False)
class StoredPage:
    """A page that can be shared."""

    hash: bytes
    """Hash of its content and of all pages before it."""
    parent: bytes
    """Hash of the page before it; empty at the start of a sequence."""
    tokens: tuple[int, ...]
    """Its tokens."""


@dataclass(frozen=True, eq=False)
class CacheEvents:
    """Changes of one engine's prefix cache in a tick: first pages were removed, then others stored."""

    engine: int
    stored: tuple[StoredPage, ...]
    removed: tuple[bytes, ...]
    """Hashes of pages that can no longer be shared."""
