"""Status of the server: frozen snapshots for clients, metrics and tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gimbal_jax.scheduler.trace import Trace
from gimbal_jax.serving.engine.engine import Engine
from gimbal_jax.serving.engine.status import EngineStatus, StepStatus
from gimbal_jax.serving.placement.records import PlacementStatus

State = Literal["warming", "serving", "draining", "stopped", "failed"]


@dataclass(frozen=True)
class Status:
    """The server at one moment, between two ticks.

    The counts of ``placement`` follow the tokens of ``engines`` by up to a trace period while steps run. Without steps
    in flight, ``total_counts_LSE`` sums to tokens computed times experts per token in every layer and source.
    """

    state: State
    error: str
    """Reason of the failure; empty unless the server failed."""
    traces: tuple[Trace, ...]
    """Latest published traces, one per engine; empty before the first."""
    engines: tuple[EngineStatus, ...]
    steps: StepStatus
    placement: PlacementStatus

    @property
    def preemptions(self) -> int:
        """Preemptions of all engines."""
        return sum(engine.preemptions for engine in self.engines)


def engine_status(engine: Engine, now: float) -> EngineStatus:
    """Return a snapshot of one engine; ``now`` dates the head of its queue."""
    return EngineStatus(
        tokens_computed=engine.tokens_computed,
        prefill_tokens=engine.prefill_tokens,
        preemptions=engine.preemptions,
        free_pages=engine.free_pages,
        cached_pages=engine.cached_pages,
        prefix_queries=engine.prefix_queries,
        prefix_hits=engine.prefix_hits,
        queue_head=engine.queue_head(now),
    )
