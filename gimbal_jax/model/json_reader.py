"""Typed reading of a JSON configuration that reports all of its problems at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


class JsonReader:
    """Look-ups in one JSON object. Problems are noted, not raised, and the keys that were read are remembered.

    A null counts as absent. A refused value is replaced by one that lets the reading go on.
    """

    def __init__(self, values: Mapping[str, Any], problems: list[str], prefix: str = ""):
        self.values, self.problems, self.prefix = values, problems, prefix
        self._read: set[str] = set()

    def get(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None, low: int = 1) -> int:
        value = self.get(key, default)
        if type(value) is not int or value < low:
            self.refuse(key, f"want an integer >= {low}")
            return low
        return value

    def number(self, key: str, default: float | None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            self.refuse(key, "want a number > 0")
            return 1.0
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "want true or false")
        return bool(value)

    def refuse(self, key: str, want: str) -> None:
        shown = repr(self.values[key]) if key in self.values else "missing"
        if len(shown) > 120:
            shown = shown[:117] + "..."
        self.problems.append(f"{self.prefix}{key} is {shown}; {want}")

    def refuse_unread(self, harmless: Collection[str] = ()) -> None:
        """Refuse every key that nothing has read, unless it is harmless, null or false."""
        for key, value in self.values.items():
            if key not in self._read and key not in harmless and value is not None and value is not False:
                self.refuse(key, "not supported")
