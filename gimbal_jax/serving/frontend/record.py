"""The record of one request, from its arrival to its end. Logs, histograms and spans are made from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """The client and the trace of a request."""

    client: str = ""
    """Name of the client's API key or certificate, or its address."""
    traceparent: str = ""
    """W3C trace context of the call; empty without one."""


NO_ORIGIN = Origin()
"""Origin of requests that did not arrive by gRPC."""


@dataclass(slots=True)
class RequestRecord:
    """One sequence from its arrival to its end. The frontend fills it, and hands it out when the sequence has ended.

    Durations are seconds from ``arrival``.
    """

    request_id: str
    """The client's request id; with several choices "INDEX_ID"."""
    origin: Origin
    priority: int
    prompt_tokens: int
    arrival: float
    """Time of arrival, in seconds on the server's monotonic clock."""
    engine: int | None = None
    """Engine that ran the sequence; None until it has one."""
    rule: str = ""
    """Dispatch rule that chose the engine; empty until it has one."""
    cached_tokens: int | None = None
    """Prompt tokens that the prefix cache held; None until the first step."""
    output_tokens: int = 0
    outcome: str = ""
    """Finish reason, "cancelled" (the client left, or its deadline passed) or "refused"; empty while it runs."""
    error: str = ""
    """Reason for the outcomes "error" and "refused", and for "abort" by the server."""
    queue_s: float | None = None
    """Duration until the first step began; None until then."""
    first_token_s: float | None = None
    """Duration until the first token reached the frontend; None until then."""
    total_s: float = 0.0
    """Duration until the end; 0 until then."""

    @property
    def token_s(self) -> float | None:
        """Mean seconds from one output token to the next; None for fewer than two."""
        if self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.total_s - self.first_token_s) / (self.output_tokens - 1)
