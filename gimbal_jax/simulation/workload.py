"""What arrives: requests with their times, lengths and topics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arrival:
    """One request."""

    time_s: float
    input_tokens: int
    output_tokens: int
    topic: int | None = 0
    """None: the topic of whichever source gets it."""
    engine: int | None = None
    """Where it must go; None: dispatch decides."""
