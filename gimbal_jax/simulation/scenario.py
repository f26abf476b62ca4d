"""All inputs of a simulated run in one record, and the rate that a system sustains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from gimbal_jax.bench.measurement import Measurement
from gimbal_jax.config import GPU_ENGINE, Exchange, MeshConfig
from gimbal_jax.model.hf_config import PRESETS
from gimbal_jax.scheduler.counts_file import load_counts
from gimbal_jax.simulation.cost_sets import CostSet
from gimbal_jax.simulation.costs import h100_costs
from gimbal_jax.simulation.profile import place_offline
from gimbal_jax.simulation.results import run_record
from gimbal_jax.simulation.routing import Router, RoutingConfig, recorded_router, synthetic_router
from gimbal_jax.simulation.shapes import MEASURED, unpriced_fields
from gimbal_jax.simulation.simulate import Run, Testbed, simulate
from gimbal_jax.simulation.systems import SYSTEMS
from gimbal_jax.simulation.work import Costs
from gimbal_jax.simulation.workload import WorkloadConfig, make_workload

MODEL = PRESETS[MEASURED]
"""The model whose kernels were measured, which is also the paper's."""
MODELS = tuple(name for name, preset in PRESETS.items() if not unpriced_fields(preset))
"""Names of the models whose steps have prices."""
DEFAULT_WORKLOAD = WorkloadConfig()
DEFAULT_ROUTING = RoutingConfig()
PAPER_MESH = MeshConfig(dp=2, tp=2)
KV_TOKENS = 1_199_872
"""Tokens in an engine's KV cache on 4xH100 at DP 2 x TP 2, from `gimbal mesh plan`."""
REFERENCE = "vllm"
"""System whose capacity ``share_of_capacity`` refers to, so that all systems are compared at one rate."""
EARLIER_SEED = 10_000
"""Added to the seed for the earlier run by which an offline system is profiled."""


@dataclass(frozen=True)
class Scenario:
    """All inputs of a simulated run. The defaults are the paper's testbed: 4 H100s, DP 2, TP 2."""

    system: str = "gimbal"
    """Name of one of ``SYSTEMS``."""
    costs: CostSet = "graph"
    workload: WorkloadConfig = DEFAULT_WORKLOAD
    share_of_capacity: float | None = None
    """Rate as a share of the rate that ``REFERENCE`` sustains in this scenario; None for the workload's own rate."""
    routing: RoutingConfig = DEFAULT_ROUTING
    recording: str | None = None
    """Counts file of a real server to route by, or None. It uses only ``trend_s`` of ``routing``, the window length."""
    model: str = MEASURED
    """One of ``MODELS``."""
    mesh: MeshConfig = PAPER_MESH
    exchange: Exchange = "sparse"
    token_budget: int = GPU_ENGINE.token_budget
    max_rows: int = 256
    """Most requests per engine and step: vLLM's default ``max_num_seqs`` in the paper's time."""
    kv_tokens: int = KV_TOKENS
    """Tokens in the KV cache of each engine."""
    seed: int = 0
    """Seed of the router, the workload and the run."""

    def __post_init__(self) -> None:
        if self.system not in SYSTEMS:
            raise ValueError(f"system must be one of {', '.join(SYSTEMS)}, not {self.system}")
        if self.model not in PRESETS:
            raise ValueError(f"model must be one of {', '.join(MODELS)}, not {self.model}")
        if errors := unpriced_fields(PRESETS[self.model]):
            raise ValueError(f"model {self.model}: {errors[0]}")
        if self.share_of_capacity is not None and not 0 < self.share_of_capacity < float("inf"):
            raise ValueError(f"share_of_capacity must be above 0 and finite, not {self.share_of_capacity}")
        for name in ("persistence", "trend"):
            if not 0 <= getattr(self.routing, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, not {getattr(self.routing, name)}")
        if not self.routing.trend_s > 0:
            raise ValueError(f"trend_s must be above 0, not {self.routing.trend_s}")
        if self.routing.topics < 1:
            raise ValueError(f"topics must be at least 1, not {self.routing.topics}")
        if self.kv_tokens < GPU_ENGINE.page_size:
            raise ValueError(f"kv_tokens must be at least a page of {GPU_ENGINE.page_size}, not {self.kv_tokens}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, not {self.seed}")


OnDone = Callable[[Measurement], None]


def run_scenario(scenario: Scenario, on_done: OnDone = lambda measurement: None) -> dict[str, Any]:
    """Run a scenario, and return for JSON the scenario, the rate, and the fields of ``run_record``."""
    at_rate = with_rate(scenario)
    run = simulate_scenario(at_rate, on_done)
    return {"scenario": asdict(scenario), "rate": at_rate.workload.rate, **run_record(run)}


def simulate_scenario(
    scenario: Scenario, on_done: OnDone = lambda measurement: None, costs: Costs | None = None
) -> Run:
    """Run a scenario and return the run, which is the same for equal scenarios.

    ``costs`` replaces the scenario's named costs in the run. A share of capacity always uses the named costs.
    """
    scenario = with_rate(scenario)
    system, mesh = SYSTEMS[scenario.system], scenario.mesh
    router = scenario_router(scenario)
    arrivals = make_workload(scenario.workload, router, scenario.seed)
    # An offline system starts from a placement by a profile, and may assign requests to engines.
    slot_of_expert_LE = None
    if system.offline is not None:
        earlier = make_workload(scenario.workload, router, scenario.seed + EARLIER_SEED)
        rng = np.random.default_rng(scenario.seed)
        slot_of_expert_LE, arrivals = place_offline(system.offline, router, arrivals, earlier, mesh, rng)
    if costs is None:
        costs = h100_costs(scenario.costs, PRESETS[scenario.model], mesh, scenario.exchange)
    return simulate(system, testbed(scenario), costs, router, arrivals, scenario.seed, slot_of_expert_LE, on_done)


def testbed(scenario: Scenario) -> Testbed:
    """Return the model, mesh and engine of a scenario. Queues hold all requests, so that none is rejected."""
    model = PRESETS[scenario.model]
    engine = replace(
        GPU_ENGINE,
        max_model_len=model.max_position,
        num_pages=scenario.kv_tokens // GPU_ENGINE.page_size,
        max_rows=scenario.max_rows,
        token_budget=scenario.token_budget,
        max_queue=max(GPU_ENGINE.max_queue, scenario.workload.requests),
        prefix_cache=False,
        exchange=scenario.exchange,
    )
    return Testbed(model, scenario.mesh, engine)


def scenario_router(scenario: Scenario) -> Router:
    """Return the router of a scenario. The last ones are cached, because drawing a bank takes a second."""
    return _router(scenario.model, scenario.routing, scenario.recording, scenario.mesh.dp, scenario.seed)


def with_rate(scenario: Scenario) -> Scenario:
    """Return the scenario with its share of capacity turned into a rate."""
    if scenario.share_of_capacity is None:
        return scenario
    rate = scenario.share_of_capacity * capacity(replace(scenario, system=REFERENCE))
    return replace(scenario, share_of_capacity=None, workload=replace(scenario.workload, rate=rate))


def capacity(scenario: Scenario) -> float:
    """Return the requests per second that the scenario's system sustains. Its rate and arrivals are ignored.

    All requests arrive at time 0, enough to fill all rows four times. The measurement runs from the time when half of
    them have their first token to the time when all have it. In this time rows are full and requests wait. The rate is
    tokens per second, prompts and outputs, divided by the mean tokens of a request.
    """
    requests = max(scenario.workload.requests, 4 * scenario.mesh.dp * scenario.max_rows)
    workload = replace(scenario.workload, requests=requests, arrivals="at-once", rate=1.0)
    return _capacity(replace(scenario, workload=workload, share_of_capacity=None))


@cache
def _capacity(scenario: Scenario) -> float:
    return sustained_rate(simulate_scenario(scenario).requests)


def sustained_rate(requests: Sequence[Measurement]) -> float:
    """Return the requests per second of a run in which all requests arrived at time 0, as ``capacity`` defines it.

    A prompt and its first token count when that token arrives. The other tokens count evenly from then to the end.
    """
    first_N, end_N = (np.array([getattr(r, name) for r in requests]) for name in ("ttft_s", "e2e_s"))
    prompt_N, output_N = (np.array([getattr(r, name) for r in requests]) for name in ("input_tokens", "output_tokens"))
    begin, end = np.median(first_N), first_N.max()
    inside_N = np.clip(end_N, begin, end) - np.clip(first_N, begin, end)
    # Prompts that ended inside the measured time, and the share of the outputs that lies inside it.
    tokens = (prompt_N + 1)[first_N > begin].sum()
    tokens += ((output_N - 1) * inside_N / np.maximum(end_N - first_N, 1e-9)).sum()
    return float(tokens / (end - begin) / (prompt_N + output_N).mean())


@lru_cache(maxsize=2)
def _router(name: str, routing: RoutingConfig, recording: str | None, sources: int, seed: int) -> Router:
    model = PRESETS[name]
    layers, experts, k = len(model.moe_layers), model.num_experts, model.experts_per_token
    if recording is None:
        return synthetic_router(routing, layers, experts, k, seed)
    counts_WLSE = load_counts(Path(recording)).counts_WLSE
    wanted, found = (layers, sources, experts), counts_WLSE.shape[1:]
    if found != wanted:
        words = "{} layers, {} sources (DP) and {} experts"
        raise ValueError(f"{recording}: must be of {words.format(*wanted)}, not {words.format(*found)}")
    return recorded_router(counts_WLSE, k, routing.trend_s, seed)
