"""What is known of a request when it has ended: the one record that logs, histograms and spans are made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """Where a request came from, as far as its call tells."""

    client: str = ""
    """The name of its key, of its certificate, or else its address."""
    traceparent: str = ""
    """W3C trace context of the call; empty without one."""


@dataclass(frozen=True)
class RequestRecord:
    """One sequence from arrival to end. Durations are seconds from its arrival on the server's monotonic clock."""

    request_id: str
    origin: Origin
    engine: int | None
    """The engine that ran it; None if it ended before it had one."""
    rule: str
    """Of dispatch, by which it got there; empty without one."""
    priority: int
    prompt_tokens: int
    cached_tokens: int | None
    """Prompt tokens that the prefix cache held; None if it did not start."""
    output_tokens: int
    outcome: str
    """Its finish reason, "cancelled" (the client left, or its deadline passed) or "refused"."""
    error: str
    """Why, where the outcome is "error" or "refused"."""
    arrival: float
    """On the monotonic clock."""
    queue_s: float | None
    """Until its first step began; None if none did."""
    first_token_s: float | None
    """Until its first token reached the frontend; None if none did."""
    total_s: float

    @property
    def token_s(self) -> float | None:
        """Mean time from one output token to the next; None for fewer than two."""
        if self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.total_s - self.first_token_s) / (self.output_tokens - 1)


NO_ORIGIN = Origin()
"""Of requests that no call brought."""
