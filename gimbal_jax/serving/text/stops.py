"""The text of one output up to its first stop string, streamed piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence

type Decoder = Callable[[Sequence[int]], str]
"""A function from the next tokens of one output to the text that they complete (``Tokenizer.decoder``)."""


def find_stop(text: str, start: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """Return (begin, stop string) of the stop string that ends first, of those that end after ``start``.

    If two end at the same character, the result is the one that comes first in ``stops`` (vLLM's rule).
    """
    found = [(text.find(stop, max(0, start - len(stop) + 1)), stop) for stop in stops]
    return min((hit for hit in found if hit[0] >= 0), key=lambda hit: hit[0] + len(hit[1]), default=None)


def length_held(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of a stop string."""
    held = 0
    for stop in stops:
        begin = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while begin >= 0 and not stop.startswith(text[begin:]):
            begin = text.find(stop[0], begin + 1)
        if begin >= 0:
            held = max(held, len(text) - begin)
    return held


class StopText:
    """Text that is released as it arrives, except for an end that may be the beginning of a stop string.

    ``matched`` is the stop string that ended the text, None before. ``include`` leaves it in the text.
    """

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self.matched: str | None = None
        self._stops = stops
        self._include = include
        self._keep = max((len(stop) for stop in stops), default=1) - 1
        self._tail = ""  # the last _keep characters, in which a stop string may have begun
        self._held = 0  # characters at the end of _tail that were not released

    def add(self, piece: str, may_stop: bool = True) -> str:
        """Add a piece, and return the text that is released. Unless ``may_stop``, no stop string ends within it."""
        text, start = self._tail + piece, len(self._tail)
        released = start - self._held
        hit = find_stop(text, start, self._stops) if may_stop else None
        if hit is not None:
            begin, self.matched = hit
            self._held = 0
            return text[released : begin + len(self.matched) if self._include else begin]
        self._held = 0 if self._include else length_held(text, self._stops)
        self._tail = text[max(0, len(text) - self._keep) :]
        return text[released : len(text) - self._held]

    def rest(self) -> str:
        """Return the text that was held back, at the end of the output."""
        held, self._held = self._held, 0
        return self._tail[len(self._tail) - held :]


class OutputText:
    """The text of one output, from its tokens.

    A stop string that ends within the first ``min_tokens`` tokens is ignored (vLLM's rule).
    """

    def __init__(
        self, decode: Decoder, stops: tuple[str, ...] = (), include: bool = False, min_tokens: int = 0
    ) -> None:
        self._decode = decode
        self._text = StopText(stops, include)
        self._min_tokens = min_tokens
        self._tokens = 0

    @property
    def matched(self) -> str | None:
        """The stop string that ended the output, None before."""
        return self._text.matched

    def add(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Return the text that is released, and the number of the tokens up to the end of the output."""
        released = []
        for count, token_id in enumerate(token_ids, 1):
            self._tokens += 1
            released.append(self._text.add(self._decode([token_id]), self._tokens > self._min_tokens))
            if self.matched is not None:
                return "".join(released), count
        return "".join(released), len(token_ids)

    def rest(self) -> str:
        """Return the text that was held back, at the end of the output."""
        return self._text.rest()
