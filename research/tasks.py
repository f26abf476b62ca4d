"""Tasks of the reproduction: runs and others. Each task is a small record, and its result can be written as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from gimbal_jax.simulation.costs import CostSet, h100_costs
from gimbal_jax.simulation.scenario import (
    MODEL,
    REFERENCE,
    Scenario,
    capacity,
    run_scenario,
    scenario_router,
    simulate_scenario,
    testbed,
)
from gimbal_jax.simulation.simulate import simulate
from gimbal_jax.simulation.systems import SYSTEMS
from gimbal_jax.simulation.workload import Arrival, WorkloadConfig
from research.replicas import replica_study


@dataclass(frozen=True)
class Capacity:
    """Requests per second that ``REFERENCE`` sustains in a scenario, measured with one seed."""

    scenario: Scenario


@dataclass(frozen=True)
class OneRequest:
    """A single request on the paper's testbed."""

    prompt_tokens: int
    costs: CostSet
    output_tokens: int = 128
    """Output length, enough to measure TPOT."""


@dataclass(frozen=True)
class ExpertCounts:
    """Counts of the experts that a run's tokens chose, by source."""

    scenario: Scenario


@dataclass(frozen=True)
class Replicas:
    """Time that redundant experts would save in a run's steps."""

    scenario: Scenario


@dataclass(frozen=True)
class CalibrationPoint:
    """Weights of the placement objective to compare with the exact solver; ``reproduce.calibration_point`` does it."""

    beta: float
    gamma: float
    windows: int
    time_limit_s: float = 5.0
    gap: float = 1e-3


Task = Scenario | Capacity | OneRequest | ExpertCounts | Replicas | CalibrationPoint


def scenario_of(task: Task) -> Scenario | None:
    """Return the run that a task is or evaluates; None if there is none."""
    match task:
        case Scenario():
            return task
        case ExpertCounts(scenario) | Replicas(scenario):
            return scenario
    return None


def capacity_task(task: Task) -> Capacity | None:
    """Return the capacity that a task needs if its load is a share of capacity; None for other tasks.

    The capacity does not depend on system, seed, topics or step budget, so that all of these are compared at one rate.
    """
    scenario = scenario_of(task)
    if scenario is None or scenario.share_of_capacity is None:
        return None
    default = Scenario()
    return Capacity(
        replace(
            scenario,
            system=REFERENCE,
            workload=WorkloadConfig(scenario.workload.lengths, scenario.workload.requests),
            share_of_capacity=None,
            routing=default.routing,
            token_budget=default.token_budget,
            seed=default.seed,
        )
    )


def at_capacity(task: Task, sustained: float) -> Task:
    """Return the task with its share of capacity replaced by that share of ``sustained`` requests per second.

    Raises ValueError if the task has no share of capacity.
    """
    scenario = scenario_of(task)
    if scenario is None or scenario.share_of_capacity is None:
        raise ValueError(f"{task}: must have a share of capacity")
    workload = replace(scenario.workload, rate=scenario.share_of_capacity * sustained)
    scenario = replace(scenario, share_of_capacity=None, workload=workload)
    return replace(task, scenario=scenario) if isinstance(task, ExpertCounts | Replicas) else scenario


def run_task(task: Task) -> dict[str, Any]:
    """Compute a task. A share of capacity refers to the capacity with the task's own seed, unlike ``at_capacity``.

    Raises ValueError for a ``CalibrationPoint``, which ``reproduce.calibration_point`` computes.
    """
    match task:
        case Scenario():
            return run_scenario(task)
        case Capacity(scenario):
            return {"requests_per_s": capacity(scenario)}
        case OneRequest():
            return _one_request(task)
        case ExpertCounts(scenario):
            run = simulate_scenario(scenario)
            return {"counts_LSE": run.counts_LSE.tolist(), "ranks": scenario.mesh.ranks}
        case Replicas(scenario):
            return replica_study(scenario)
        case CalibrationPoint():
            raise ValueError("CalibrationPoint: run_task cannot compute it. Use research.reproduce.compute")


def _one_request(task: OneRequest) -> dict[str, Any]:
    scenario = Scenario("static", task.costs)
    costs = h100_costs(task.costs, MODEL, scenario.mesh, scenario.exchange)
    arrivals = (Arrival(0.0, task.prompt_tokens, task.output_tokens),)
    run = simulate(SYSTEMS["static"], testbed(scenario), costs, scenario_router(scenario), arrivals, seed=0)
    kv_bytes = 2 * MODEL.num_kv_heads * MODEL.head_dim * 2 * MODEL.num_layers * task.prompt_tokens
    return {"clients": asdict(run.clients), "kv_mib": kv_bytes / 2**20}
