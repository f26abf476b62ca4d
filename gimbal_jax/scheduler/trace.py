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
