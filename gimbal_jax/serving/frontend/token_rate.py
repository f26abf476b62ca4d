"""Tokens per second of each engine, for load balancers that ask now and then."""

from __future__ import annotations


class TokenRate:
    """What each engine generated in the last whole second; nothing older is kept. ``now`` is in seconds."""

    def __init__(self, engines: int) -> None:
        self._second = 0
        self._counts = [0] * engines
        self._last = [0] * engines

    def add(self, engine: int, tokens: int, now: float) -> None:
        self._advance(now)
        self._counts[engine] += tokens

    def per_second(self, now: float) -> tuple[int, ...]:
        self._advance(now)
        return tuple(self._last)

    def _advance(self, now: float) -> None:
        passed = int(now) - self._second
        if passed > 0:
            nothing = [0] * len(self._counts)
            self._last, self._counts = self._counts if passed == 1 else nothing, nothing.copy()
            self._second += passed
