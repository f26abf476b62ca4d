"""The input and the output of a dispatch decision, and the helpers that every dispatch rule uses.

Suffix ``_S``: one value per engine. A dispatch rule is a pure function from a ``View`` to a ``Decision``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add

from gimbal_jax.scheduler.trace import Trace


@dataclass(frozen=True)
class View:
    """Snapshot of the dispatcher's memory and of one request: everything that a dispatch rule may depend on."""

    traces: tuple[Trace | None, ...]
    """Latest trace of each engine; None if the engine has not sent one."""
    compensation_S: tuple[int, ...]
    """Prefill tokens dispatched to each engine that its latest trace does not include yet."""
    picks_S: tuple[int, ...]
    """Requests dispatched to each engine since its latest trace arrived."""
    picked_tokens_S: tuple[int, ...]
    """Prompt tokens of the requests that ``picks_S`` counts."""
    in_flight_S: tuple[int, ...]
    """Requests dispatched to each engine that have not ended."""
    turn: int
    """Engine after the last one chosen. Round-robin dispatch takes it, and ties are broken from it on."""
    choices: int
    """Requests for which a rule chose an engine before this one; requests pinned by the user do not count."""
    now: float
    """Time of the decision in seconds, on the clock of the traces."""
    prompt_tokens: int
    """Prompt length of the request in tokens."""
    cached_tokens_S: tuple[int, ...]
    """Prompt tokens of the request that each engine's prefix cache holds."""
    draw: float
    """Random number, uniform in [0, 1), for rules that use chance."""


@dataclass(frozen=True)
class Decision:
    """The chosen engine, the name of the rule that chose it, and the numbers that the rule compared."""

    engine: int | None
    """The chosen engine; None if the request gets its engine later (policy ``late``)."""
    rule: str
    """Name of the rule that decided, for instance ``kv_guard``; ``pinned`` if the user chose the engine."""
    terms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Summands of each engine's score by name, in the unit of the rule; empty if the rule needs no scores."""

    @property
    def scores_S(self) -> tuple[float, ...]:
        """Sum of the terms per engine; empty without terms."""
        return sum_S(self.terms)

    def explain(self) -> str:
        """Describe the decision: one line for the rule, then one line per engine with its score and its terms."""
        choice = "no engine yet" if self.engine is None else f"engine {self.engine}"
        lines = [f"{choice} by {self.rule}"]
        for engine, score in enumerate(self.scores_S):
            terms = [f"{values_S[engine]:g} {name}" for name, values_S in self.terms.items() if values_S[engine]]
            lines.append(f"  engine {engine}: {score:g}" + (f" = {' + '.join(terms)}" if terms else ""))
        return "\n".join(lines)


@dataclass(frozen=True)
class DispatchRecord:
    """A decision with its request and its time."""

    request_id: str
    time: float
    """Seconds, on the clock of the traces."""
    decision: Decision


def least[T: (float, tuple[float, float])](values: Sequence[T], start: int) -> int:
    """Return the engine with the least value; of equal ones the first from ``start`` on, so that none is favoured."""
    smallest, tail = min(values), values[start:]
    return start + tail.index(smallest) if smallest in tail else values.index(smallest)


def sum_S(terms: Mapping[str, tuple[float, ...]]) -> tuple[float, ...]:
    """Return the sum of the terms per engine; empty without terms."""
    total: Iterable[float] = ()
    for index, values_S in enumerate(terms.values()):
        total = map(add, total, values_S) if index else values_S
    return tuple(total)
