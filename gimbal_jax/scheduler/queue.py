"""Which request an engine runs first (paper 4.4, algorithm 2), and the baselines."""

from __future__ import annotations

import math
from typing import NamedTuple, assert_never

from gimbal_jax.config import QueueConfig


class QueueItem(NamedTuple):
    """The properties of a request with prefill left, started or not, that the order may depend on."""

    arrival: float
    """Time of arrival in seconds."""
    prefill_tokens: int
    """Prefill tokens that are left to compute; tokens in a prefix cache do not count."""
    waited_tokens: int = 0
    """Prefill tokens that the queue has processed, of any request, since this one joined it."""
    priority: int = 0
    """The user's priority; lower runs first."""


def queue_key(config: QueueConfig, item: QueueItem, now: float) -> tuple[float, ...]:
    """Return the sort key of a request at ``now``, smallest first. Keys change with time, so sort before every step.

    - ``sjf_aging`` (paper 4.4): requests that waited longer than ``aging_s`` by arrival, then the shortest prefill.
    - ``fcfs``: by arrival.
    - ``hrrn``: highest response ratio next. The waiting time and the request's own length are both counted in prefill
      tokens, so the speed of the hardware cancels out.
    - ``priority`` (ours): by the user's priority, then as ``sjf_aging``.
    """
    match config.policy:
        case "sjf_aging":
            return _sjf_aging(config, item, now)
        case "fcfs":
            return (item.arrival,)
        case "hrrn":
            return (-item.waited_tokens / max(1, item.prefill_tokens), item.arrival)
        case "priority":
            return (item.priority, *_sjf_aging(config, item, now))
        case unknown:
            assert_never(unknown)


def key_until(config: QueueConfig, item: QueueItem, now: float) -> float:
    """Return the time before which an item that does not start keeps its ``queue_key`` of ``now``.

    -inf if the key may change at any time, inf if it never changes.
    """
    match config.policy:
        case "hrrn":  # changes with every token that the queue processes
            return -math.inf
        case "fcfs":
            return math.inf
        case "sjf_aging" | "priority":
            return math.inf if now - item.arrival > config.aging_s else item.arrival + config.aging_s
        case unknown:
            assert_never(unknown)


def _sjf_aging(config: QueueConfig, item: QueueItem, now: float) -> tuple[float, ...]:
    if now - item.arrival > config.aging_s:
        return (0, item.arrival)
    return (1, item.prefill_tokens, item.arrival)
