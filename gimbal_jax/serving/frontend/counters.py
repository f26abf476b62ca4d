"""Counters of the frontend since its start, and tokens per second."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Counts since the start, for metrics. Written on the event loop only."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Sequences that ended, by finish reason, "cancelled" (the client left) or "refused"."""
    rules: Counter[str] = field(default_factory=Counter)
    """Dispatch decisions by rule."""
    prompt_tokens: int = 0
    """Prompt tokens of all admitted sequences."""
    generated_tokens: int = 0
    """Output tokens that reached the frontend."""
    started_tokens_S: list[int] = field(default_factory=list)
    """Prompt tokens of the sequences that ended after their first step, by engine."""
    cached_tokens_S: list[int] = field(default_factory=list)
    """Prompt tokens of the same sequences that the prefix cache held, by engine."""


class TokenRate:
    """Tokens that each engine generated in the last whole second. ``now`` is in seconds and never decreases."""

    def __init__(self, engines: int) -> None:
        self._second = 0
        self._counts = [0] * engines
        self._last = [0] * engines

    def add(self, engine: int, tokens: int, now: float) -> None:
        """Count tokens of an engine."""
        self._advance(now)
        self._counts[engine] += tokens

    def per_second(self, now: float) -> tuple[int, ...]:
        """Return the tokens of each engine in the last whole second."""
        self._advance(now)
        return tuple(self._last)

    def _advance(self, now: float) -> None:
        passed = int(now) - self._second
        if passed > 0:
            nothing = [0] * len(self._counts)
            self._last, self._counts = self._counts if passed == 1 else nothing, nothing.copy()
            self._second += passed
