"""The trace: the state that an engine publishes to the frontend (paper 4.1)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trace:
    """State of one engine at one time."""

    engine: int
    """Index of the engine."""
    time: float
    """Seconds, on the server's clock."""
    seen: int
    """Highest dispatch sequence number that the engine has received. Later requests are not in the counts below."""
    running_prefill_tokens: int
    """R_d: prefill tokens that running requests have left to compute."""
    waiting_prefill_tokens: int
    """W_d: prefill tokens of requests that have not started."""
    kv_use: float
    """K_d: share of KV pages in use, in [0, 1]."""
    expert_pressure: float
    """Q_d: expert tokens per step on the ranks of this engine, in token equivalents."""
    running_requests: int
    """Number of running requests."""
    waiting_requests: int
    """Number of requests that have not started."""
    kv_tokens: int
    """Tokens of running requests whose keys and values are in the KV cache."""
    waiting_tokens: int
    """Sum of the lengths of the waiting requests in tokens, whether or not the tokens are cached."""


def idle_trace(engine: int, time: float = 0.0) -> Trace:
    """Return the trace of an engine that has received no request."""
    return Trace(
        engine,
        time,
        seen=0,
        running_prefill_tokens=0,
        waiting_prefill_tokens=0,
        kv_use=0.0,
        expert_pressure=0.0,
        running_requests=0,
        waiting_requests=0,
        kv_tokens=0,
        waiting_tokens=0,
    )
