"""Which request an engine runs first (paper 4.4, algorithm 2), and the baselines."""

from __future__ import annotations

import math
from typing import NamedTuple

from gimbal_jax.config import QueueConfig


class Job(NamedTuple):
    """What the order may depend on: a request with prefill left, started or not."""

    arrival: float
    prefill_tokens: int
    """Tokens that it still has to prefill; what a prefix cache holds does not count."""
    waited_tokens: int = 0
    """Prefill tokens that its queue has processed, of whatever request, since it joined."""
    priority: int = 0
    """The user's; lower runs first."""


def queue_key(config: QueueConfig, job: Job, now: float) -> tuple[float, ...]:
    """Sort key of a request at ``now``, smallest first; keys change with time, so sort every step anew.

    ``sjf_aging`` (paper 4.4): requests that waited longer than ``aging_s`` in order of arrival, then
    the shortest prefill. ``fcfs``: order of arrival. ``hrrn``: highest response ratio next, where the
    time waited and the own length are both counted in prefill tokens, so that the speed of the
    machine cancels out. ``priority``: the user's priority, and ``sjf_aging`` within it (ours).
    """
    match config.policy:
        case "sjf_aging":
            return _sjf_aging(config, job, now)
        case "fcfs":
            return (job.arrival,)
        case "hrrn":
            return (-job.waited_tokens / max(1, job.prefill_tokens), job.arrival)
        case "priority":
            return (job.priority, *_sjf_aging(config, job, now))


def key_until(config: QueueConfig, job: Job, now: float) -> float:
    """A job that does not start keeps its ``queue_key`` of ``now`` before this time; a key need not change then."""
    match config.policy:
        case "hrrn":  # changes with whatever the queue processes
            return -math.inf
        case "fcfs":
            return math.inf
        case "sjf_aging" | "priority":
            return math.inf if now - job.arrival > config.aging_s else job.arrival + config.aging_s


def _sjf_aging(config: QueueConfig, job: Job, now: float) -> tuple[float, ...]:
    if now - job.arrival > config.aging_s:
        return (0, job.arrival)
    return (1, job.prefill_tokens, job.arrival)
