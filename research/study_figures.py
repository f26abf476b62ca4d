"""Pictures of the studies. ``tables`` has their numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.figure import Figure

from gimbal_jax.simulation.scenario import Scenario
from gimbal_jax.simulation.systems import PRESSURE_WEIGHTS
from research import experiments
from research.comparison import Measure, changes, estimate, load_of, under_system, value
from research.experiments import Scope
from research.plots import TTFT_TPOT, Drawn, bars, colour, label, lines, lines_by_load, panels, ratio_bars, value_bars
from research.store import ResultStore
from research.tasks import Replicas


def draw_topics(store: ResultStore, scope: Scope) -> Drawn:
    """Draw sources that keep their topics: TPOT and TTFT over vllm's, and the remote share."""
    yield from _changes_and(
        "remote_share", "topics", "Sources keep topics", experiments.with_topics, experiments.COMPARED, store, scope
    )


def draw_exchange(store: ResultStore, scope: Scope) -> Drawn:
    """Draw all-gather instead of all-to-all: TPOT and TTFT over vllm's, and the time in the exchange."""
    yield from _changes_and(
        "exchange_share", "exchange", "All-gather", experiments.with_gather, experiments.GATHER_SYSTEMS, store, scope
    )


def draw_late(store: ResultStore, scope: Scope) -> Drawn:
    """Draw TTFT, its P99 and TPOT by load, with late binding and dispatch at arrival."""
    found = [s for s in experiments.late_settings(scope) if s.workload.lengths == "azure-code"]
    if _all(store, found, experiments.DISPATCH_SYSTEMS):
        figure = Figure(figsize=(12, 3), layout="constrained")
        for axes, measure in panels(figure, ("ttft", "p99_ttft", "tpot")):
            lines_by_load(axes, store, found, experiments.DISPATCH_SYSTEMS, measure)
        figure.suptitle("Late binding against dispatch at arrival, azure-code, simulated, costs graph", fontsize=10)
        yield "study_late", figure


def draw_budget(store: ResultStore, scope: Scope) -> Drawn:
    """Draw latencies by the token budget of a step."""
    found = experiments.budget_settings(scope)
    if not _all(store, found, ("static", "late_static")):
        return
    figure = Figure(figsize=(12, 3), layout="constrained")
    for axes, measure in panels(figure, ("ttft", "p99_ttft", "tpot", "e2e")):
        for number, system in enumerate(("static", "late_static")):
            by_budget = [
                [s for s in under_system(system, found) if s.token_budget == budget] for budget in experiments.BUDGETS
            ]
            values = [[value(store, run, measure) for run in runs] for runs in by_budget]
            lines(axes, experiments.BUDGETS, values, system, colour(system, number))
        axes.set_xscale("log", base=2)
        axes.set_xticks(experiments.BUDGETS, [str(budget) for budget in experiments.BUDGETS])
        axes.set_xlabel("tokens of a step", fontsize=8)
    figure.suptitle("Token budget of a step, azure-code, simulated, costs graph", fontsize=10)
    yield "study_budget", figure


def draw_queues(store: ResultStore, scope: Scope) -> Drawn:
    """Draw TTFT, its P99 and latency by queue order, at the highest load."""
    found = experiments.queue_settings(scope)
    highest = [s for s in found if load_of(s) == max(map(load_of, found))]
    if not _all(store, found, experiments.queue_systems()):
        return
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    measures: tuple[Measure, ...] = ("ttft", "p99_ttft", "e2e")
    for axes, measure in zip(figure.subplots(1, len(measures)), measures, strict=True):
        value_bars(axes, store, experiments.queue_systems(), highest, measure)
    figure.suptitle(f"Queue orders, azure-code, load {load_of(highest[0]):.0%}, simulated, costs graph", fontsize=10)
    yield "study_queues", figure


def draw_replicas(store: ResultStore, scope: Scope) -> Drawn:
    """Draw the time of the experts by placement, relative to the contiguous one."""
    found = [store[task] for scenario in experiments.replica_settings(scope) if (task := Replicas(scenario)) in store]
    if not found:
        return
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2), ("prefill", "decode"), strict=True):
        by_name: dict[str, list[float]] = {}
        for seconds in (run["experts_s"] for run in found):
            for name in seconds:
                by_name.setdefault(name, []).append(seconds[name][kind] / seconds["contiguous"][kind])
        bars(axes, {name: estimate(ratios) for name, ratios in by_name.items()}, form=".3f")
        axes.set_title("steps with prefill" if kind == "prefill" else "decode steps", fontsize=9)
        axes.set_ylabel("experts' time over contiguous", fontsize=8)
    figure.suptitle("Redundant experts, simulated, costs graph", fontsize=10)
    yield "study_replicas", figure


def draw_multihost(store: ResultStore, scope: Scope) -> Drawn:
    """Draw latencies and bytes across nodes by persistence of topics."""
    found = experiments.multihost_settings(scope)
    if not all(
        any(run in store for run in experiments.as_variant(name, found)) for name in experiments.MULTIHOST_VARIANTS
    ):
        return
    measures: tuple[Measure, ...] = ("tpot", "ttft", "far_bytes")
    figure = Figure(figsize=(12, 6.4), layout="constrained")
    rows = figure.subplots(len(experiments.MULTIHOST_MESHES), len(measures))
    for row, mesh in zip(rows, experiments.MULTIHOST_MESHES, strict=True):
        for axes, measure in zip(row, measures, strict=True):
            for number, name in enumerate(experiments.MULTIHOST_VARIANTS):
                runs = [s for s in experiments.as_variant(name, found) if s.mesh == mesh]
                by_x = [[s for s in runs if s.routing.persistence == p] for p in experiments.MULTIHOST_PERSISTENCES]
                values = [[value(store, run, measure) for run in at] for at in by_x]
                lines(axes, experiments.MULTIHOST_PERSISTENCES, values, name, colour("", number))
            axes.set_xlabel("persistence of topics", fontsize=8)
            axes.set_title(f"{mesh.nodes} nodes: {label(measure)}", fontsize=9)
    rows[0][-1].legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.0))
    figure.suptitle("Qwen3-235B-A22B on nodes of 8 H100s, TP 4, simulated, costs graph", fontsize=10)
    yield "study_multihost", figure


def draw_pressure_weights(store: ResultStore, scope: Scope) -> Drawn:
    """Draw changes of latencies by the weight of expert pressure in dispatch."""
    found = experiments.fashionable(scope)
    groups = experiments.pressure_systems()
    if not _all(store, found, [system for systems in groups for system in systems]):
        return
    figure = Figure(figsize=(11, 3), layout="constrained")
    row = figure.subplots(1, 3)
    for axes, measure in zip(row, (*TTFT_TPOT, "e2e"), strict=True):
        for number, (systems, name) in enumerate(zip(groups, ("experts stay", "gimbal's placement"), strict=True)):
            before = under_system(systems[0], found)
            values = [[100 * v for v in changes(store, under_system(s, found), before, measure)] for s in systems]
            lines(axes, PRESSURE_WEIGHTS, values, name, colour("", number))
        axes.axhline(0, color="#444444", linewidth=0.8, linestyle="--")
        axes.set_xlabel("lambda_moe", fontsize=8)
        axes.set_title(f"{measure.upper()}, change against 0, %", fontsize=9)
    row[0].legend(fontsize=7, frameon=False)
    figure.suptitle("Expert pressure in dispatch, topics in fashion, simulated, costs graph", fontsize=10)
    yield "study_pressure", figure


STUDIES: Mapping[str, Callable[[ResultStore, Scope], Drawn]] = {
    "topics": draw_topics,
    "exchange": draw_exchange,
    "late": draw_late,
    "budget": draw_budget,
    "queues": draw_queues,
    "replicas": draw_replicas,
    "multihost": draw_multihost,
    "pressure": draw_pressure_weights,
}


def _changes_and(
    measure: Measure,
    name: str,
    title: str,
    settings_of: Callable[..., list[Scenario]],
    systems: Sequence[str],
    store: ResultStore,
    scope: Scope,
) -> Drawn:
    """Draw TPOT and TTFT over vllm's, and the values of another measure, for each cost set."""
    for costs in experiments.VARIED:
        found = settings_of(scope, costs)
        if not _all(store, found, systems):
            continue
        figure = Figure(figsize=(12, 3.4), layout="constrained")
        *ratios, last = figure.subplots(1, 3)
        for axes, compared in zip(ratios, TTFT_TPOT, strict=True):
            ratio_bars(axes, store, systems, found, compared)
        value_bars(last, store, systems, found, measure)
        figure.suptitle(f"{title}, {scope.shapes[0]}, lowest and highest load, simulated, costs {costs}", fontsize=10)
        yield f"study_{name}_{costs}", figure


def _all(store: ResultStore, found: Sequence[Scenario], systems: Sequence[str]) -> bool:
    """Return whether the store has at least one run of each system."""
    return all(any(run in store for run in under_system(system, found)) for system in systems)
