"""Typed reader of a JSON configuration that reports all problems together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


class JsonReader:
    """Look-ups in one JSON object, with a list of problems instead of exceptions.

    The reader records the keys that were read. A null counts as absent. A rejected value is replaced by a valid one, so
    that reading can go on.

    Args:
      values: the JSON object.
      problems: list to which each problem is appended as a text.
      prefix: text before each key in a problem, such as "rope_scaling.".
    """

    def __init__(self, values: Mapping[str, Any], problems: list[str], prefix: str = ""):
        self.values, self.problems, self.prefix = values, problems, prefix
        self._read: set[str] = set()

    def get(self, key: str, default: Any) -> Any:
        """Return the value of a key without a check."""
        self._read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None, low: int = 1) -> int:
        """Return an integer of at least ``low``. Without a default (None) the key is required."""
        value = self.get(key, default)
        if type(value) is not int or value < low:
            self.refuse(key, f"want an integer >= {low}")
            return low
        return value

    def number(self, key: str, default: float | None) -> float:
        """Return a finite number above 0. Without a default (None) the key is required."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            self.refuse(key, "want a number > 0")
            return 1.0
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "want true or false")
        return bool(value)

    def refuse(self, key: str, want: str) -> None:
        """Report the value of a key as a problem; ``want`` is the rule that it breaks."""
        shown = repr(self.values[key]) if key in self.values else "missing"
        if len(shown) > 120:
            shown = shown[:117] + "..."
        self.problems.append(f"{self.prefix}{key} is {shown}; {want}")

    def refuse_unread(self, harmless: Collection[str] = ()) -> None:
        """Report each key that has not been read as a problem, unless it is harmless, null or false."""
        for key, value in self.values.items():
            if key not in self._read and key not in harmless and value is not None and value is not False:
                self.refuse(key, "not supported")
