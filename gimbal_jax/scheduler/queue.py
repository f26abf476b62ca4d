"""Which waiting request an engine runs first (paper 4.4, algorithm 2)."""

from __future__ import annotations

from typing import Literal

from gimbal_jax.config import QueueConfig


def queue_key(
    config: QueueConfig, arrival: float, remaining_prefill_tokens: int, now: float
) -> tuple[Literal[0], float] | tuple[Literal[1], int, float]:
    """Sort key of a waiting request at ``now``, smallest first; keys change with time, so sort every step anew.

    ``sjf_aging``: requests that waited longer than ``aging_s`` in order of arrival, then the
    shortest remaining prefill. ``fcfs``: order of arrival.
    """
    if config.policy == "fcfs" or now - arrival > config.aging_s:
        return (0, arrival)
    return (1, remaining_prefill_tokens, arrival)
