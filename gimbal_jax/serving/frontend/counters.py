"""Counters of the frontend since its start, and tokens per second."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counters:
    """What happened since start, for metrics. Written on the event loop only."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Ended sequences by finish reason, "cancelled" (the client left) or "refused"."""
    rules: Counter[str] = field(default_factory=Counter)
    """Dispatch decisions by rule."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    started_tokens_S: list[int] = field(default_factory=list)
    """Prompts of ended sequences that had started, in tokens."""
    cached_tokens_S: list[int] = field(default_factory=list)
    """Those of them that the prefix cache held."""


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
