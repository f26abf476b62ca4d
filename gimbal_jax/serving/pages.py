"""Which KV pages of one engine are free."""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """Hands out the page numbers 0 to ``num_pages - 1``, each to one owner at a time."""

    def __init__(self, num_pages: int) -> None:
        # Popped from the end, so a page that was just freed is used again first.
        self._free = list(range(num_pages - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def available(self) -> int:
        """Free pages."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` pages, or None (and take nothing) when fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        self._used.update(pages)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back. ValueError for a page that is not in use."""
        for page in pages:
            if page not in self._used:
                raise ValueError(f"page {page} is not in use: freed twice, or never allocated")
            self._used.remove(page)
            self._free.append(page)
