"""What `python -m research.scale` measures: each part at one size, as a record for a line of JSON.

Axes: L MoE layers, S sources (DP engines), E experts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from benchmarks.scheduler import bind_late, dispatch, microseconds
from gimbal_jax.bench.measurement import Measurement
from gimbal_jax.config import DispatchPolicy, MeshConfig, PlacementConfig, PlacementPolicy
from gimbal_jax.model.hf_config import PRESETS
from gimbal_jax.model.sizes import expert_bytes
from gimbal_jax.scheduler.migration import migration_between, plan_rounds
from gimbal_jax.scheduler.placement import propose, static_placement
from gimbal_jax.scheduler.traffic import imbalance_L, remote_share
from gimbal_jax.simulation.routing import Router, RoutingConfig, synthetic_router
from gimbal_jax.simulation.scenario import Scenario, scenario_router, simulate_scenario
from gimbal_jax.simulation.workload import Trace, WorkloadConfig

Record = Mapping[str, Any]

DISPATCH: tuple[DispatchPolicy, ...] = ("gimbal", "late", "vllm_classic")
PLACEMENT: tuple[PlacementPolicy, ...] = ("eplb", "gimbal", "gimbal_refined")
PERSISTENCE = (0.0, 0.8)
MODEL = PRESETS["Qwen3-235B-A22B"]
"""Whose layers, experts and bytes placement is measured with."""
GPUS_PER_NODE = 8
WINDOW_REQUESTS = 32
"""Of each source in a window, of two blocks of tokens each."""


@dataclass(frozen=True)
class Size:
    """A mesh. With more ranks than the model has experts, placement is measured with an expert for each rank."""

    sources: int
    ranks: int

    @property
    def experts(self) -> int:
        return max(MODEL.num_experts, self.ranks)

    @property
    def mesh(self) -> MeshConfig:
        return MeshConfig(dp=self.sources, tp=self.ranks // self.sources)


SIZES = tuple(Size(*pair) for pair in ((2, 4), (4, 8), (8, 16), (16, 32), (32, 64), (64, 128), (64, 256)))


def dispatch_records(sources: Sequence[int], repeats: int, on_done: Callable[[], object]) -> list[Record]:
    """Least time for one request, to its end; under late binding of one among as many as there are idle engines.

    All are measured once, then all again: what disturbs the machine for a while spoils no size for good.
    """
    runs = {(policy, engines): _dispatch(policy, engines) for policy in DISPATCH for engines in sources}
    least = dict.fromkeys(runs, math.inf)
    for _ in range(repeats):
        for (policy, engines), run in runs.items():
            requests = engines if policy == "late" else 1
            least[policy, engines] = min(least[policy, engines], microseconds(run, 1) / requests)
            on_done()
    return [{"part": "dispatch", "policy": p, "sources": engines, "us": us} for (p, engines), us in least.items()]


def _dispatch(policy: DispatchPolicy, engines: int) -> Callable[[], object]:
    return bind_late(engines, engines) if policy == "late" else dispatch(policy, engines)


def placement_record(policy: PlacementPolicy, size: Size, persistence: float, seed: int) -> Record:
    """A decision from one window with contiguous experts, and what it makes of the next window."""
    router = _router(size.experts, persistence, seed)
    rng = np.random.default_rng(seed)
    window_LSE, next_LSE = (window_counts(router, size.sources, rng) for _ in range(2))
    config = PlacementConfig(policy)
    old_LE = static_placement(router.layers, router.experts, size.ranks)
    began = time.process_time()
    proposal = propose(window_LSE, old_LE, size.mesh, config)
    decided = time.process_time()
    new_LE = proposal.slot_of_expert_LE if proposal.apply else old_LE
    rounds_L = [len(plan_rounds(*pair, size.ranks, config.rows_per_pair)) for pair in zip(old_LE, new_LE, strict=True)]
    planned = time.process_time()
    return {
        "part": "placement",
        "policy": policy,
        "sources": size.sources,
        "ranks": size.ranks,
        "experts": size.experts,
        "persistence": persistence,
        "ms": 1e3 * (decided - began),
        "rounds_ms": 1e3 * (planned - decided),
        "imbalance_before": float(imbalance_L(next_LSE, old_LE, size.ranks).mean()),
        "imbalance_after": float(imbalance_L(next_LSE, new_LE, size.ranks).mean()),
        "hottest_expert": hottest_expert(next_LSE, size.ranks),
        "remote_before": remote_share(next_LSE, old_LE, size.ranks),
        "remote_after": remote_share(next_LSE, new_LE, size.ranks),
        "moved": proposal.experts_moved if proposal.apply else 0,
        "bytes": migration_between(old_LE, new_LE, size.ranks).sent_bytes(expert_bytes(MODEL)),
        "rounds": sum(rounds_L),
    }


def hottest_expert(counts_LSE: np.ndarray, ranks: int) -> float:
    """Load of the hottest expert over the mean rank's, mean over layers: no placement without replicas is more even."""
    load_LE = counts_LSE.sum(axis=1)
    return float((load_LE.max(axis=1) * ranks / load_LE.sum(axis=1)).mean())


def window_counts(router: Router, sources: int, rng: np.random.Generator) -> np.ndarray:
    """Expert tokens [L, S, E] of ``WINDOW_REQUESTS`` prompts of each source."""
    counts_LSE = np.zeros((router.layers, sources, router.experts), np.int64)
    for source in range(sources):
        for topic in router.draw_topics([0.0] * WINDOW_REQUESTS, rng):
            profile = router.profile(router.prompt_token(topic), source, 0.0)
            counts_LSE[:, source] += router.count_blocks(profile, 2, rng)
    return counts_LSE


@lru_cache(maxsize=2)
def _router(experts: int, persistence: float, seed: int) -> Router:
    routing = RoutingConfig(persistence=persistence)
    return synthetic_router(routing, len(MODEL.moe_layers), experts, MODEL.experts_per_token, seed)


def run_record(
    system: str, size: Size, lengths: Trace, requests: int, rate: float, seed: int, on_done: Callable[[], object]
) -> Record:
    """A simulated run of Qwen3-30B-A3B on H100s, at ``rate`` requests per second in all."""

    def done(measurement: Measurement) -> None:
        on_done()

    scenario = Scenario(
        system=system,
        workload=WorkloadConfig(lengths, requests, rate),
        mesh=replace(size.mesh, nodes=max(1, size.ranks // GPUS_PER_NODE)),
        seed=seed,
    )
    scenario_router(scenario)  # kept from now on, and no part of the run
    began, began_cpu = time.perf_counter(), time.process_time()
    run = simulate_scenario(scenario, done)
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    return {
        "part": "run",
        "system": system,
        "lengths": lengths,
        "sources": size.sources,
        "ranks": size.ranks,
        "requests": requests,
        "rate": rate,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "requests_per_cpu_s": requests / cpu_s,
        "steps": run.steps,
        "cpu_ms_per_step": 1e3 * cpu_s / run.steps,
        "cpu_us_per_output_token": 1e6 * cpu_s / sum(m.output_tokens for m in run.requests),
        "tokens_per_step": run.tokens_computed / run.steps,
        "simulated_s": run.seconds,
        "step_ms": 1e3 * sum(run.parts.values()) / run.steps,
        "running": run.running,
        "ttft_mean_s": run.clients.ttft_mean_s,
        "tpot_mean_s": run.clients.tpot_mean_s,
        "imbalance": run.imbalance,
        "remote_share": run.remote_share,
    }


def growth(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Exponent a of values ~ sizes ** a, fitted to the largest four sizes: how it goes on, not how it begins."""
    return float(np.polyfit(np.log(sizes[-4:]), np.log(values[-4:]), 1)[0])


def size_where_full(size: float, us: float, exponent: float, rate: float) -> float:
    """Engines at which one thread does nothing but dispatch.

    ``us`` is one dispatch at ``size`` engines, growing by ``exponent``; ``rate`` is requests per second of each engine.
    """
    return size * (1e6 / (us * rate * size)) ** (1 / (1 + exponent))
