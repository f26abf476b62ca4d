"""A whole run under virtual time: arrivals are dispatched, engines tick, and clients are measured.

Server, dispatcher, queues, traffic and placement are those that serve; devices, clock and clients are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from gimbal_jax.config import EngineConfig, MeshConfig, ModelConfig, ServerConfig
from gimbal_jax.model.memory import expert_bytes
from gimbal_jax.scheduler.dispatcher import Dispatcher
from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.serving.replay import Measurement, Summary, summarise
from gimbal_jax.serving.request import Output, Request, SamplingParams
from gimbal_jax.serving.server import Server
from gimbal_jax.serving.status import PlacementRecord
from gimbal_jax.simulation.clock import VirtualClock, VirtualExecutor
from gimbal_jax.simulation.routing import Router
from gimbal_jax.simulation.runner import SimulatedRunner
from gimbal_jax.simulation.system import System
from gimbal_jax.simulation.work import Costs
from gimbal_jax.simulation.workload import Arrival

GAP_PERIOD_S = 10.0
"""Prompt throughput is compared between engines over periods of this length, as vLLM's log does."""


@dataclass(frozen=True)
class Testbed:
    """What the systems run on."""

    model: ModelConfig
    mesh: MeshConfig
    engine: EngineConfig


@dataclass(frozen=True, eq=False)
class Run:
    """What came of a run. Means over time are weighted by it, from the first arrival to the last token."""

    requests: tuple[Measurement, ...]
    """In the order of arrival."""
    clients: Summary
    seconds: float
    """From 0 to the last token."""
    steps: int
    parts: Mapping[str, float]
    """Seconds that passed in steps, by part, and in migrations."""
    running: float
    """Mean number of requests that an engine runs."""
    waiting: float
    """Mean number of requests that wait, all over."""
    kv_use: float
    """Mean share of KV pages in use."""
    prompt_gap: float
    """Mean difference between the engines with the most and the least prompt tokens per second (``GAP_PERIOD_S``)."""
    imbalance: float
    """Fullest over mean rank load, step by step and layer by layer, weighted by tokens."""
    remote_share: float
    """Share of expert tokens that left their source's ranks."""
    placements: tuple[PlacementRecord, ...]
    experts_moved: int
    preemptions: int
    counts_LSE: np.ndarray
    slot_of_expert_LE: np.ndarray
    """At the end."""
    outside: Mapping[str, int]
    """Prices that were extrapolated, by operation; see ``Costs.outside``."""


def simulate(
    system: System,
    testbed: Testbed,
    costs: Costs,
    router: Router,
    arrivals: Sequence[Arrival],
    seed: int,
    slot_of_expert_LE: np.ndarray | None = None,
    on_done: Callable[[Measurement], None] = lambda measurement: None,
) -> Run:
    """Serve all arrivals (by rising time); the same arguments give the same run.

    ``slot_of_expert_LE`` is the placement at the start, by default the contiguous one.
    """
    return _Simulation(system, testbed, costs, router, seed, slot_of_expert_LE, on_done).run(arrivals)
