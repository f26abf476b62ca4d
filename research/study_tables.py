"""Tables of the studies: what helps most beside the paper's methods. Every number is simulated, at ``graph`` costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gimbal_jax.config import MeshConfig
from gimbal_jax.simulation.scenario import Scenario
from research.comparison import Measure, changes, estimate, load_of, under_system
from research.experiments import (
    BUDGETS,
    DISPATCH_SYSTEMS,
    MULTIHOST_MESHES,
    MULTIHOST_PERSISTENCES,
    MULTIHOST_VARIANTS,
    Scope,
    as_variant,
    budget_settings,
    fashionable,
    late_settings,
    multihost_settings,
    pressure_systems,
    queue_settings,
    queue_systems,
    replica_settings,
)
from research.store import ResultStore
from research.tables import Row, Table, against, change_text, mean_text, runs_table
from research.tasks import Replicas

MULTIHOST_BASELINE = next(iter(MULTIHOST_VARIANTS))
LATENCIES: tuple[Measure, ...] = ("ttft", "p99_ttft", "tpot", "e2e", "throughput")


def late_table(store: ResultStore, scope: Scope) -> Table:
    """Dispatch at arrival and late binding, experts unmoved."""
    rows = [
        against((lengths, f"{load:.0%}", system), system, found, baseline=DISPATCH_SYSTEMS[0])
        for lengths, load, found in _by_load(late_settings(scope))
        for system in DISPATCH_SYSTEMS
    ]
    title = "Late binding: changes against vLLM's dispatch and queue, experts unmoved"
    return runs_table(store, "late", title, ("lengths", "load", "system"), rows, LATENCIES, ("ttft", "p99_ttft"))


def budget_table(store: ResultStore, scope: Scope) -> Table:
    """Token budgets of a step, under one load."""
    found = budget_settings(scope)
    rows = []
    for system in ("static", "late_static"):
        most = under_system(system, [s for s in found if s.token_budget == BUDGETS[-1]])
        for budget in BUDGETS:
            rows.append(Row((system, f"{budget:,}"), [replace(s, token_budget=budget) for s in most], most))
    title = f"Tokens of a step, azure-code: changes against {BUDGETS[-1]:,}"
    return runs_table(store, "budget", title, ("system", "budget"), rows, LATENCIES, ("ttft", "tpot", "e2e"))


def queue_table(store: ResultStore, scope: Scope) -> Table:
    """Queue orders under two dispatchers, experts unmoved."""
    rows = [
        against((f"{load:.0%}", system), system, found, baseline=f"{system.split('_')[0]}_static_fcfs")
        for _, load, found in _by_load(queue_settings(scope))
        for system in queue_systems()
    ]
    title = "Queue orders, azure-code (a system without a queue in its name has sjf_aging): changes against fcfs"
    return runs_table(store, "queues", title, ("load", "system"), rows, LATENCIES, ("ttft", "p99_ttft"))


def replica_table(store: ResultStore, scope: Scope) -> Table:
    """Time of the experts by placement, over the contiguous one's."""
    found = [store[task] for scenario in replica_settings(scope) if (task := Replicas(scenario)) in store]
    rows = []
    for name in found[0]["experts_s"] if found else ():
        cells = []
        for kind in ("prefill", "decode"):
            saved = [run["experts_s"]["contiguous"][kind] - run["experts_s"][name][kind] for run in found]
            before = [run["experts_s"]["contiguous"][kind] for run in found]
            cells.append(change_text(estimate([-s / b for s, b in zip(saved, before, strict=True)])))
            cells.append(change_text(estimate([-s / r["steps_s"][kind] for s, r in zip(saved, found, strict=True)])))
        rows.append([name, *cells])
    columns = ["placement", "experts, steps with prefill", "whole step", "experts, decode steps", "whole step"]
    return Table("replicas", "Redundant experts: changes of time against the contiguous placement", columns, rows)


def multihost_table(store: ResultStore, scope: Scope) -> Table:
    """What placement is worth on several nodes, by persistence of topics."""
    found = multihost_settings(scope)
    rows = []
    for mesh in MULTIHOST_MESHES:
        for name in MULTIHOST_VARIANTS:
            at = [[s for s in found if _mixed(s) == (mesh, persistence)] for persistence in MULTIHOST_PERSISTENCES]
            runs = [(as_variant(name, s), as_variant(MULTIHOST_BASELINE, s)) for s in at]
            changed = [[] if run == before else changes(store, run, before, "tpot") for run, before in runs]
            cells = [
                *map(change_text, map(estimate, changed)),
                *(mean_text(store, run, "far_bytes") for run, _ in runs),
            ]
            rows.append([str(mesh.nodes), name, *cells])
    columns = [f"{what}, {p:g}" for what in ("TPOT", "MB") for p in MULTIHOST_PERSISTENCES]
    title = "TPOT against static, and MB a token across nodes, by persistence of topics"
    return Table("multihost", title, ["nodes", "system", *columns], rows)


def multihost_runs_table(store: ResultStore, scope: Scope) -> Table:
    """All measures of the same runs."""
    rows = []
    for mesh in MULTIHOST_MESHES:
        for persistence in MULTIHOST_PERSISTENCES:
            at = [s for s in multihost_settings(scope) if _mixed(s) == (mesh, persistence)]
            for name in MULTIHOST_VARIANTS:
                labels = str(mesh.nodes), f"{persistence:g}", name
                rows.append(Row(labels, as_variant(name, at), as_variant(MULTIHOST_BASELINE, at)))
    means: tuple[Measure, ...] = ("ttft", "tpot", "imbalance", "far_share", "experts_moved", "migration_share")
    columns = ("nodes", "persistence", "system")
    title = "The same runs: changes against static"
    return runs_table(store, "multihost_runs", title, columns, rows, means, ("ttft", "tpot", "e2e"))


def _mixed(scenario: Scenario) -> tuple[MeshConfig, float]:
    return scenario.mesh, scenario.routing.persistence


def pressure_table(store: ResultStore, scope: Scope) -> Table:
    """Weights of expert pressure in dispatch."""
    rows = [
        against((system,), system, fashionable(scope), baseline=systems[0])
        for systems in pressure_systems()
        for system in systems
    ]
    means: tuple[Measure, ...] = ("ttft", "tpot", "imbalance", "prompt_gap")
    title = "Expert pressure in dispatch under a fashion of topics (trend 0.8): changes against weight 0"
    return runs_table(store, "pressure", title, ("system",), rows, means, ("ttft", "tpot", "e2e"))


def _by_load(scenarios: Sequence[Scenario]) -> Iterable[tuple[str, float, list[Scenario]]]:
    groups: dict[tuple[str, float], list[Scenario]] = {}
    for scenario in scenarios:
        groups.setdefault((scenario.workload.lengths, load_of(scenario)), []).append(scenario)
    return ((lengths, load, found) for (lengths, load), found in groups.items())
