"""The text of one output up to the first of its stop strings, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence

type Decoder = Callable[[Sequence[int]], str]
"""From the next tokens of one output to the text that they complete (``Tokenizer.decoder``)."""


def find_stop(text: str, start: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the stop string begins that ends first, of those that end after ``start``, and which it is.

    Of two that end at once it is the one that comes first in ``stops`` (vLLM's rule).
    """
    found = [(text.find(stop, max(0, start - len(stop) + 1)), stop) for stop in stops]
    return min((hit for hit in found if hit[0] >= 0), key=lambda hit: hit[0] + len(hit[1]), default=None)


def length_held(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of the text that may be the beginning of a stop string."""
    held = 0
    for stop in stops:
        begin = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while begin >= 0 and not stop.startswith(text[begin:]):
            begin = text.find(stop[0], begin + 1)
        if begin >= 0:
            held = max(held, len(text) - begin)
    return held


class StopText:
    """Gives out text as it comes, but never the beginning of a stop string before it is clear that it is none.

    ``include`` leaves the stop string itself in the text.
    """

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self.matched: str | None = None
        """The stop string that ended the text."""
        self._stops = stops
        self._include = include
        self._keep = max((len(stop) for stop in stops), default=1) - 1
        self._tail = ""
        """The last ``_keep`` characters, in which a stop string may have begun."""
        self._held = 0
        """Characters at its end that were not given out."""

    def add(self, piece: str, may_stop: bool = True) -> str:
        """What may be given out now that ``piece`` has come. Unless ``may_stop``, nothing that ends in it counts."""
        text, start = self._tail + piece, len(self._tail)
        given = start - self._held
        hit = find_stop(text, start, self._stops) if may_stop else None
        if hit is not None:
            begin, self.matched = hit
            self._held = 0
            return text[given : begin + len(self.matched) if self._include else begin]
        self._held = 0 if self._include else length_held(text, self._stops)
        self._tail = text[max(0, len(text) - self._keep) :]
        return text[given : len(text) - self._held]

    def rest(self) -> str:
        """What was held back, once it is clear that nothing follows."""
        held, self._held = self._held, 0
        return self._tail[len(self._tail) - held :]


class OutputText:
    """The text of one output from its tokens. As in vLLM no stop string counts that ends within ``min_tokens``."""

    def __init__(
        self, decode: Decoder, stops: tuple[str, ...] = (), include: bool = False, min_tokens: int = 0
    ) -> None:
        self._decode = decode
        self._text = StopText(stops, include)
        self._min_tokens = min_tokens
        self._tokens = 0

    @property
    def matched(self) -> str | None:
        """The stop string that ended the output."""
        return self._text.matched

    def add(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Text that may be given out now, and how many of the tokens belong to the output: all up to its end."""
        given = []
        for count, token_id in enumerate(token_ids, 1):
            self._tokens += 1
            given.append(self._text.add(self._decode([token_id]), self._tokens > self._min_tokens))
            if self.matched is not None:
                return "".join(given), count
        return "".join(given), len(token_ids)

    def rest(self) -> str:
        """What was held back, once it is clear that nothing follows."""
        return self._text.rest()
