"""The engine trace: what an engine tells the frontend about itself (paper 4.1)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trace:
    """State of one engine at ``time``; the frontend reads the latest one, however old.

    ``seen`` is the highest dispatch sequence number that the engine has taken in:
    work dispatched later is not yet part of the token counts below.
    """

    engine: int
    time: float
    seen: int
    running_prefill_tokens: int
    """R_d: prefill tokens that running requests still have to do."""
    waiting_prefill_tokens: int
    """W_d: prefill tokens of requests that have not started."""
    kv_use: float
    """K_d: share of KV pages in use, in [0, 1]."""
    expert_pressure: float
    """Q_d: expert tokens per step on the ranks of this engine, in token equivalents."""
    running_requests: int
    waiting_requests: int
    kv_tokens: int
    """Tokens of running requests whose keys and values are in the KV cache."""
    waiting_tokens: int
    """Lengths of the waiting requests, whether or not their tokens are cached."""


def idle_trace(engine: int, time: float = 0.0) -> Trace:
    """Trace of an engine that has seen no request."""
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
