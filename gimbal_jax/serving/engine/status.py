"""Snapshots of the engines and of their steps."""

from __future__ import annotations

from dataclasses import dataclass

from gimbal_jax.serving.engine.meters import HistogramRecord, PhaseTimes
from gimbal_jax.serving.engine.queue import QueueHead


@dataclass(frozen=True)
class EngineStatus:
    """Counters since start and current numbers of one engine."""

    tokens_computed: int
    """Tokens that went through the model."""
    prefill_tokens: int
    """Prefill tokens that went through the model."""
    preemptions: int
    """Requests that lost their row for lack of KV pages."""
    free_pages: int
    """KV pages that no sequence uses."""
    cached_pages: int
    """KV pages that hold a known prefix, in use or not."""
    prefix_queries: int
    """Prompt tokens that were looked up in the prefix cache when their sequence got a row."""
    prefix_hits: int
    """Prompt tokens that the prefix cache held."""
    queue_head: QueueHead | None
    """Waiting request that would run first; None if nothing waits."""


@dataclass(frozen=True)
class StepStatus:
    """The steps since start. A step runs all engines."""

    count: int
    compiles_after_warmup: int
    """Programs compiled since warm-up; more than 0 is a bug."""
    seconds: HistogramRecord
    """Steps by the time that the runner took for them."""
    tokens: HistogramRecord
    """Steps by their tokens, over all engines."""
    phases: tuple[PhaseTimes, ...]
    """The host's work per step, by phase; empty before the first step."""
