"""Results of finished runs in a file of JSON lines, so that interrupted work can continue."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parents[1] / "out"
"""Folder that all programs write to."""


def scenario_key(scenario: Any) -> str:
    """Return 16 hexadecimal digits for a scenario (a dataclass of JSON values): a hash of its class and all fields."""
    fields = json.dumps([type(scenario).__name__, asdict(scenario)], sort_keys=True)
    return hashlib.sha256(fields.encode()).hexdigest()[:16]


class ResultStore:
    """A file with one line per result: key, scenario and result. The last line of a key counts.

    The key contains the scenario, not the code, so results of other code need another file.
    """

    def __init__(self, path: Path) -> None:
        """Read the file, and create it if there is none. An unfinished last line is cut off.

        Raises ValueError with the number of any other line that is not a result.
        """
        self.path = path
        self._results: dict[str, Mapping[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            with path.open("r+b") as file:
                file.truncate(len(whole))
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                entry = json.loads(line)
                self._results[entry["key"]] = entry["result"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path}: line {number} is not a result") from None

    def add(self, scenario: Any, result: Mapping[str, Any]) -> None:
        """Append a result to the file."""
        key = scenario_key(scenario)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "scenario": asdict(scenario), "result": result}) + "\n")
        self._results[key] = result

    def __contains__(self, scenario: Any) -> bool:
        return scenario_key(scenario) in self._results

    def __getitem__(self, scenario: Any) -> Mapping[str, Any]:
        return self._results[scenario_key(scenario)]

    def __len__(self) -> int:
        return len(self._results)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """Iterate over all results in the order in which their keys were first added."""
        return iter(self._results.values())
