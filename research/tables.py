"""Tables of research/results.md: the figures of the paper and our studies.

Every number is simulated, except those of a "paper" column. The studies use ``graph`` costs.

A table of runs is a ``TableSpec``, which ``runs_table`` renders. The others are functions of results and scope.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import rich.table

from gimbal_jax.config import MeshConfig
from gimbal_jax.simulation.cost_sets import CostSet
from gimbal_jax.simulation.scenario import REFERENCE, Scenario
from research import experiments
from research.claims import CLAIMS, measured, worded
from research.comparison import (
    MEASURES,
    Estimate,
    Measure,
    Verdict,
    at_load,
    changes,
    estimate,
    load_of,
    under_system,
    value,
    verdict,
)
from research.experiments import COST_SETS, Scope, settings
from research.store import ResultStore
from research.tasks import ExpertCounts, Replicas
from research.traffic_shape import traffic_shape

NOTHING = "-"
MULTIHOST_BASELINE = next(iter(experiments.MULTIHOST_VARIANTS))
LATENCIES: tuple[Measure, ...] = ("ttft", "p99_ttft", "tpot", "e2e", "throughput")
TTFT_TPOT_E2E: tuple[Measure, ...] = ("ttft", "tpot", "e2e")
E2E_TTFT_TPOT: tuple[Measure, ...] = ("e2e", "ttft", "tpot")


@dataclass(frozen=True)
class Table:
    """Text in cells. The first column names the rows."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    figures: str = ""
    """Names that ``research.reproduce`` takes to compute it; all if empty."""

    def rich(self) -> rich.table.Table:
        """Return the table for a terminal."""
        first, *others = self.columns
        table = rich.table.Table(first, title=self.title)
        for column in others:
            table.add_column(column, justify="right")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Return the table for a document, below the command that computes it and its title."""
        lines = (self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows)
        command = " ".join(["python -m research.reproduce", *self.figures.split()])
        return f"`{command}`. {self.title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


@dataclass(frozen=True)
class Row:
    """Runs that differ by seed, or also by load and shape, and the run that each of them is compared with."""

    labels: Sequence[str]
    runs: Sequence[Scenario]
    baselines: Sequence[Scenario]


@dataclass(frozen=True)
class TableSpec:
    """A table of runs: means of some measures, and changes of others against the baselines."""

    name: str
    title: str
    """Title; ``{shape}`` stands for the first shape of the scope."""
    figures: str
    labels: Sequence[str]
    rows: Callable[[Scope], Iterable[Row]]
    means: Sequence[Measure]
    compared: Sequence[Measure] = ()


def runs_table(spec: TableSpec, store: ResultStore, scope: Scope) -> Table:
    """Render a table. Rows without runs are left out."""
    columns = [
        *spec.labels,
        *(MEASURES[m].label for m in spec.means),
        *(f"{MEASURES[m].label.split(',')[0]}, change" for m in spec.compared),
    ]
    cells = []
    for row in spec.rows(scope):
        if any(run in store for run in row.runs):
            found = [mean_text(store, row.runs, measure) for measure in spec.means]
            for measure in spec.compared:
                changed = [] if row.runs == row.baselines else changes(store, row.runs, row.baselines, measure)
                found.append(change_text(estimate(changed)))
            cells.append([*row.labels, *found])
    return Table(spec.name, spec.title.format(shape=scope.shapes[0]), columns, cells, spec.figures)


def against(labels: Sequence[str], system: str, grid: Sequence[Scenario], baseline: str = REFERENCE) -> Row:
    """Return a row of a system and, in the same settings, its baseline."""
    return Row(labels, under_system(system, grid), under_system(baseline, grid))


def mean_text(store: ResultStore, scenarios: Sequence[Scenario], measure: Measure) -> str:
    """Return the mean of a measure over the runs that have it."""
    values = [found for scenario in scenarios if np.isfinite(found := value(store, scenario, measure))]
    return f"{np.mean(values):{MEASURES[measure].form}}" if values else NOTHING


def change_text(found: Estimate) -> str:
    """Return a relative change, with its interval if it is of several values."""
    if found.count < 2:
        return f"{found.mean:+.1%}" if found.count else NOTHING
    return f"{found.mean:+.1%} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"


def _systems(scope: Scope) -> Iterable[Row]:
    for costs in COST_SETS:
        grid = settings(scope, costs)
        for system in (*experiments.COMPARED[1:], experiments.CALIBRATION[1], *experiments.PEERS):
            yield against(
                (costs, system),
                system,
                experiments.of_first_shape(scope, grid) if system in experiments.PEERS else grid,
            )


def _ends_of_first_shape(scope: Scope) -> Iterable[Row]:
    ends: tuple[Literal["lowest", "highest"], ...] = ("lowest", "highest")
    for costs in COST_SETS:
        for load in ends:
            grid = at_load(load, experiments.of_first_shape(scope, settings(scope, costs)))
            yield from (against((costs, load, system), system, grid) for system in experiments.COMPARED)


def _varied(
    systems: Sequence[str], settings_of: Callable[[Scope, CostSet], list[Scenario]], scope: Scope
) -> Iterable[Row]:
    return (
        against((costs, system), system, settings_of(scope, costs))
        for costs in experiments.VARIED
        for system in systems
    )


def _late(scope: Scope) -> Iterable[Row]:
    return (
        against((lengths, f"{load:.0%}", system), system, found, baseline=experiments.DISPATCH_SYSTEMS[0])
        for lengths, load, found in _by_load(experiments.late_settings(scope))
        for system in experiments.DISPATCH_SYSTEMS
    )


def _budgets(scope: Scope) -> Iterable[Row]:
    largest = [s for s in experiments.budget_settings(scope) if s.token_budget == experiments.BUDGETS[-1]]
    for system in ("static", "late_static"):
        before = under_system(system, largest)
        for budget in experiments.BUDGETS:
            yield Row((system, f"{budget:,}"), [replace(s, token_budget=budget) for s in before], before)


def _queues(scope: Scope) -> Iterable[Row]:
    return (
        against((f"{load:.0%}", system), system, found, baseline=f"{system.split('_')[0]}_static_fcfs")
        for _, load, found in _by_load(experiments.queue_settings(scope))
        for system in experiments.queue_systems()
    )


def _multihost(scope: Scope) -> Iterable[Row]:
    for mesh in experiments.MULTIHOST_MESHES:
        for persistence in experiments.MULTIHOST_PERSISTENCES:
            at = [s for s in experiments.multihost_settings(scope) if _mixed(s) == (mesh, persistence)]
            for name in experiments.MULTIHOST_VARIANTS:
                labels = str(mesh.nodes), f"{persistence:g}", name
                yield Row(labels, experiments.as_variant(name, at), experiments.as_variant(MULTIHOST_BASELINE, at))


def _pressure(scope: Scope) -> Iterable[Row]:
    return (
        against((system,), system, experiments.fashionable(scope), baseline=systems[0])
        for systems in experiments.pressure_systems()
        for system in systems
    )


def _mixed(scenario: Scenario) -> tuple[MeshConfig, float]:
    return scenario.mesh, scenario.routing.persistence


def _by_load(scenarios: Sequence[Scenario]) -> Iterable[tuple[str, float, list[Scenario]]]:
    groups: dict[tuple[str, float], list[Scenario]] = {}
    for scenario in scenarios:
        groups.setdefault((scenario.workload.lengths, load_of(scenario)), []).append(scenario)
    return ((lengths, load, found) for (lengths, load), found in groups.items())


SPECS = (
    TableSpec(
        "systems",
        "Changes against vllm, over all shapes and loads",
        "8 9 11",
        ("costs", "system"),
        _systems,
        ("experts_moved",),
        ("e2e", "ttft", "tpot", "p99_ttft", "throughput"),
    ),
    TableSpec(
        "runs",
        "Runs of the shape {shape}",
        "9 11",
        ("costs", "load", "system"),
        _ends_of_first_shape,
        (
            *("e2e", "ttft", "p99_ttft", "tpot", "throughput", "running", "kv_use", "prompt_gap"),
            *("imbalance", "remote_share"),
        ),
    ),
    TableSpec(
        "topics",
        "Persistence 0.8, first shape, lowest and highest load: changes against vllm",
        "topics",
        ("costs", "system"),
        partial(_varied, experiments.COMPARED, experiments.with_topics),
        ("imbalance", "remote_share", "exchange_share"),
        E2E_TTFT_TPOT,
    ),
    TableSpec(
        "exchange",
        "All-gather, first shape, lowest and highest load: changes against vllm",
        "exchange",
        ("costs", "system"),
        partial(_varied, experiments.GATHER_SYSTEMS, experiments.with_gather),
        ("tpot", "imbalance", "exchange_share"),
        E2E_TTFT_TPOT,
    ),
    TableSpec(
        "late",
        "Late binding: changes against vLLM's dispatch and queue, experts unmoved",
        "late",
        ("lengths", "load", "system"),
        _late,
        LATENCIES,
        ("ttft", "p99_ttft"),
    ),
    TableSpec(
        "budget",
        f"Tokens of a step, azure-code: changes against {experiments.BUDGETS[-1]:,}",
        "budget",
        ("system", "budget"),
        _budgets,
        LATENCIES,
        TTFT_TPOT_E2E,
    ),
    TableSpec(
        "queues",
        "Queue orders, azure-code (a system without a queue in its name has sjf_aging): changes against fcfs",
        "queues",
        ("load", "system"),
        _queues,
        LATENCIES,
        ("ttft", "p99_ttft"),
    ),
    TableSpec(
        "multihost_runs",
        "The same runs: changes against static",
        "multihost",
        ("nodes", "persistence", "system"),
        _multihost,
        ("ttft", "tpot", "imbalance", "far_share", "experts_moved", "migration_share"),
        TTFT_TPOT_E2E,
    ),
    TableSpec(
        "pressure",
        "Expert pressure in dispatch under a fashion of topics (trend 0.8): changes against weight 0",
        "pressure",
        ("system",),
        _pressure,
        ("ttft", "tpot", "imbalance", "prompt_gap"),
        TTFT_TPOT_E2E,
    ),
)


def claims_table(store: ResultStore, scope: Scope) -> Table:
    """Return claim by claim the paper's number and, by cost set, ours with a verdict."""
    grids = {costs: settings(scope, costs) for costs in COST_SETS}
    rows = []
    for claim in CLAIMS:
        cells = [worded(claim), claim.section, f"{claim.paper:+.1%}"]
        for grid in grids.values():
            found = measured(claim, store, grid)
            cells.append(f"{change_text(found)} {verdict(claim.paper, found)}" if found.count else NOTHING)
        rows.append(cells)
    title = "Changes: the paper's, and simulated by cost set"
    return Table("claims", title, ["claim", "section", "paper", *grids], rows, "8 9 10 11 12")


def verdicts_table(store: ResultStore, scope: Scope) -> Table:
    """Count the claims by verdict."""
    kinds: tuple[Verdict, ...] = ("confirmed", "weaker", "not seen", "contrary")
    rows = []
    for costs in COST_SETS:
        grid = settings(scope, costs)
        found = Counter(verdict(claim.paper, measured(claim, store, grid)) for claim in CLAIMS)
        rows.append([costs, *(str(found[kind]) for kind in kinds), str(found["too few runs"])])
    title = f"Verdicts on {len(CLAIMS)} claims"
    return Table("verdicts", title, ["costs", *kinds, "too few runs"], rows, "8 9 10 11 12")


def sums_by_costs(store: ResultStore, scope: Scope, key: str) -> dict[str, tuple[Counter[str], int]]:
    """Sum up a field of vllm's runs at the highest load of the first shape: its sums and all steps, by cost set."""
    found: dict[str, tuple[Counter[str], int]] = {}
    for costs in COST_SETS:
        grid = at_load("highest", experiments.of_first_shape(scope, settings(scope, costs)))
        if results := [store[scenario] for scenario in grid if scenario in store]:
            sums: Counter[str] = Counter()
            for result in results:
                sums.update(result[key])
            found[costs] = sums, sum(result["steps"] for result in results)
    return found


def parts_table(store: ResultStore, scope: Scope) -> Table:
    """Return the shares of a step's time, for vllm at the highest load of the first shape."""
    found = sums_by_costs(store, scope, "seconds_by_part")
    seconds = [of_costs for of_costs, _ in found.values()]
    parts = sorted(set().union(*seconds), key=lambda part: -max(s[part] / s.total() for s in seconds))
    rows = [["a step, ms", *(f"{1e3 * of_costs.total() / steps:.1f}" for of_costs, steps in found.values())]]
    rows += [[part, *(f"{s[part] / s.total():.1%}" for s in seconds)] for part in parts]
    return Table("parts", f"Time of vllm by part, {scope.shapes[0]}, highest load", ["part", *found], rows, "9")


def outside_table(store: ResultStore, scope: Scope) -> Table:
    """Return how many prices per step were extrapolated, for vllm at the highest load of the first shape."""
    found = sums_by_costs(store, scope, "outside")
    names = sorted(set().union(*(count for count, _ in found.values())))
    rows = [[name, *(f"{count[name] / steps:.2f}" for count, steps in found.values())] for name in names]
    return Table("outside", "Extrapolated prices per step, by operation", ["operation", *found], rows, "9")


def work_table(store: ResultStore, scope: Scope) -> Table:
    """Return what all results took to compute."""
    seconds = np.array([result["wall_s"] for result in store])
    served = sum(result["clients"]["requests"] for result in store if "clients" in result)
    rows = [
        ["results", f"{len(seconds):,}"],
        ["simulated requests", f"{served:,}"],
        ["time of one core, minutes", f"{seconds.sum() / 60:,.1f}"],
        ["median result, s", f"{np.median(seconds):.2f}" if len(seconds) else NOTHING],
    ]
    return Table("work", "Computed", ["", ""], rows)


def requests_table(store: ResultStore, scope: Scope) -> Table:
    """Return figure 2: a short and a long request, each alone. The paper gives 18.75 and 187.5 MiB, and no times."""
    rows = []
    for task in experiments.single_requests():
        if task in store:
            found = store[task]
            times = (f"{1e3 * found['clients'][name]:.2f}" for name in ("ttft_mean_s", "tpot_mean_s"))
            rows.append([task.costs, f"{task.prompt_tokens:,}", f"{found['kv_mib']:.2f}", *times])
    columns = ["costs", "prompt tokens", "KV cache, MiB (exact)", "TTFT, ms", "TPOT, ms"]
    return Table("requests", "One request alone", columns, rows, "2")


def traffic_table(store: ResultStore, scope: Scope) -> Table:
    """Return figure 4: how uneven experts are, and what leaves its source."""
    rows = []
    for scenario in experiments.static_runs(scope):
        if (task := ExpertCounts(scenario)) in store:
            shape = traffic_shape(store[task])
            layer, source = np.unravel_index(shape.remote_LS.argmax(), shape.remote_LS.shape)
            hottest_L = shape.relative_LE.max(axis=1)
            cells = [f"{scenario.routing.persistence:g}", f"{np.median(hottest_L):.1f}", f"{hottest_L.max():.1f}"]
            cells += [f"{shape.imbalance_L.mean():.2f}", f"{shape.imbalance_L.max():.2f}", f"{shape.remote_share:.1%}"]
            rows.append([*cells, f"{shape.remote_LS.max():.1%} (layer {layer}, source {source})"])
    columns = ["persistence", "hottest expert, median layer", "worst layer", "fullest rank, mean layer", "worst layer"]
    title = "Contiguous placement. Paper: 83.4 % (layer 23, source 0) and 66.5 % (layer 36, source 1) remote"
    return Table("traffic", title, [*columns, "remote share", "most remote"], rows, "4")


def calibration_table(store: ResultStore, scope: Scope) -> Table:
    """Return figure 6: greedy compared with the exact solver, by weights."""
    rows = []
    for task in experiments.calibration_points(scope):
        if task in store:
            greedy, exact = store[task]["gimbal"], store[task]["exact"]
            cells = [f"({1:g}, {task.beta:g}, {task.gamma:g})", f"{greedy['same']:.1%}", f"{greedy['comm_gap']:+.2%}"]
            rows.append([*cells, f"{exact['moved']:.1%}", f"{exact['fullest']:.3f}", f"{greedy['fullest']:.3f}"])
    columns = ["alpha, beta, gamma", "same rank as exact", "comm over exact's", "exact moves", "exact's fullest"]
    title = (
        "Weights compared with the exact solver. Paper, at its (1, 0.0025, 1): over 80 % the same, comm within 0.6 %"
    )
    return Table("calibration", title, [*columns, "greedy's fullest"], rows, "6")


def replica_table(store: ResultStore, scope: Scope) -> Table:
    """Return the time of the experts by placement, relative to the contiguous one."""
    found = [store[task] for scenario in experiments.replica_settings(scope) if (task := Replicas(scenario)) in store]
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
    title = "Redundant experts: changes of time against the contiguous placement"
    return Table("replicas", title, columns, rows, "replicas")


def multihost_table(store: ResultStore, scope: Scope) -> Table:
    """Return what placement is worth on several nodes, by persistence of topics."""
    found = experiments.multihost_settings(scope)
    rows = []
    for mesh in experiments.MULTIHOST_MESHES:
        for name in experiments.MULTIHOST_VARIANTS:
            at = [
                [s for s in found if _mixed(s) == (mesh, persistence)]
                for persistence in experiments.MULTIHOST_PERSISTENCES
            ]
            runs = [(experiments.as_variant(name, s), experiments.as_variant(MULTIHOST_BASELINE, s)) for s in at]
            changed = [[] if run == before else changes(store, run, before, "tpot") for run, before in runs]
            cells = [
                *map(change_text, map(estimate, changed)),
                *(mean_text(store, run, "far_bytes") for run, _ in runs),
            ]
            rows.append([str(mesh.nodes), name, *cells])
    columns = [f"{what}, {p:g}" for what in ("TPOT", "MB") for p in experiments.MULTIHOST_PERSISTENCES]
    title = "TPOT against static, and MB a token across nodes, by persistence of topics"
    return Table("multihost", title, ["nodes", "system", *columns], rows, "multihost")


OTHERS = (
    *(verdicts_table, claims_table, parts_table, outside_table, requests_table, traffic_table, calibration_table),
    *(replica_table, multihost_table, work_table),
)


def all_tables(store: ResultStore, scope: Scope) -> list[Table]:
    """Return every table of research/results.md."""
    return [make(store, scope) for make in OTHERS] + [runs_table(spec, store, scope) for spec in SPECS]
