"""Tables of the paper's figures. Every number is simulated, but for those that a column calls the paper's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import rich.table

from gimbal_jax.simulation.scenario import REFERENCE, Scenario
from research.claims import CLAIMS, measured, worded
from research.comparison import (
    MEASURES,
    Estimate,
    Measure,
    Verdict,
    at_load,
    changes,
    estimate,
    under_system,
    value,
    verdict,
)
from research.experiments import (
    CALIBRATION,
    COMPARED,
    COST_SETS,
    GATHER_SYSTEMS,
    PEERS,
    VARIED,
    Scope,
    calibration_points,
    of_first_shape,
    settings,
    single_requests,
    static_runs,
    with_gather,
    with_topics,
)
from research.store import ResultStore
from research.tasks import ExpertCounts
from research.traffic_shape import traffic_shape

NOTHING = "-"


@dataclass(frozen=True)
class Table:
    """Text in cells; the first column names the rows."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def rich(self) -> rich.table.Table:
        """For a terminal."""
        first, *others = self.columns
        table = rich.table.Table(first, title=self.title)
        for column in others:
            table.add_column(column, justify="right")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """For a document; the title above it."""
        lines = (self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows)
        return f"{self.title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


@dataclass(frozen=True)
class Row:
    """Runs that differ by their seeds, or by loads and shapes too, and what each of them is compared with."""

    labels: Sequence[str]
    runs: Sequence[Scenario]
    baselines: Sequence[Scenario]


def runs_table(
    store: ResultStore,
    name: str,
    title: str,
    labels: Sequence[str],
    rows: Iterable[Row],
    means: Sequence[Measure],
    compared: Sequence[Measure],
) -> Table:
    """Means of some measures, and changes of others against the baselines; rows without runs are left out."""
    columns = [
        *labels,
        *(MEASURES[m].label for m in means),
        *(f"{MEASURES[m].label.split(',')[0]}, change" for m in compared),
    ]
    cells = []
    for row in rows:
        if any(run in store for run in row.runs):
            found = [mean_text(store, row.runs, measure) for measure in means]
            if row.runs == row.baselines:
                found += [NOTHING] * len(compared)
            else:
                found += [change_text(estimate(changes(store, row.runs, row.baselines, m))) for m in compared]
            cells.append([*row.labels, *found])
    return Table(name, title, columns, cells)


def mean_text(store: ResultStore, scenarios: Sequence[Scenario], measure: Measure) -> str:
    """Mean of what there is of a measure."""
    values = [found for scenario in scenarios if np.isfinite(found := value(store, scenario, measure))]
    return f"{np.mean(values):{MEASURES[measure].form}}" if values else NOTHING


def change_text(found: Estimate) -> str:
    """A relative change, with its interval where it is of several values."""
    if found.count < 2:
        return f"{found.mean:+.1%}" if found.count else NOTHING
    return f"{found.mean:+.1%} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"


def claims_table(store: ResultStore, scope: Scope) -> Table:
    """Claim by claim: the paper's number, and by cost set ours with a verdict."""
    grids = {costs: settings(scope, costs) for costs in COST_SETS}
    rows = []
    for claim in CLAIMS:
        cells = [worded(claim), claim.section, f"{claim.paper:+.1%}"]
        for grid in grids.values():
            found = measured(claim, store, grid)
            cells.append(f"{change_text(found)} {verdict(claim.paper, found)}" if found.count else NOTHING)
        rows.append(cells)
    return Table(
        "claims", "Changes: the paper's, and simulated by cost set", ["claim", "section", "paper", *grids], rows
    )


def verdicts_table(store: ResultStore, scope: Scope) -> Table:
    """How many claims got which verdict."""
    kinds: tuple[Verdict, ...] = ("confirmed", "weaker", "not seen", "contrary")
    rows = []
    for costs in COST_SETS:
        grid = settings(scope, costs)
        found = Counter(verdict(claim.paper, measured(claim, store, grid)) for claim in CLAIMS)
        rows.append([costs, *(str(found[kind]) for kind in kinds), str(found["too few runs"])])
    return Table("verdicts", f"Verdicts on {len(CLAIMS)} claims", ["costs", *kinds, "too few runs"], rows)


def systems_table(store: ResultStore, scope: Scope) -> Table:
    """Every system beside vllm, over all settings of a cost set; peers over the first shape."""

    def rows() -> Iterable[Row]:
        for costs in COST_SETS:
            grid = settings(scope, costs)
            for system in (*COMPARED[1:], CALIBRATION[1], *PEERS):
                yield against((costs, system), system, of_first_shape(scope, grid) if system in PEERS else grid)

    title = "Changes against vllm, over all shapes and loads"
    compared: tuple[Measure, ...] = ("e2e", "ttft", "tpot", "p99_ttft", "throughput")
    return runs_table(store, "systems", title, ("costs", "system"), rows(), ("experts_moved",), compared)


def absolute_table(store: ResultStore, scope: Scope) -> Table:
    """What runs of the first shape measured at the ends of the loads."""

    def rows() -> Iterable[Row]:
        for costs in COST_SETS:
            for load in ("lowest", "highest"):
                grid = at_load(load, of_first_shape(scope, settings(scope, costs)))
                for system in COMPARED:
                    yield against((costs, load, system), system, grid)

    means: tuple[Measure, ...] = ("e2e", "ttft", "p99_ttft", "tpot", "throughput", "running", "kv_use", "prompt_gap")
    title = f"Runs of the shape {scope.shapes[0]}"
    labels = ("costs", "load", "system")
    return runs_table(store, "runs", title, labels, rows(), (*means, "imbalance", "remote_share"), ())


def parts_table(store: ResultStore, scope: Scope) -> Table:
    """Where the time of vllm's steps goes at the highest load of the first shape."""
    found: dict[str, Counter[str]] = {}
    steps: Counter[str] = Counter()
    for costs in COST_SETS:
        for scenario in at_load("highest", of_first_shape(scope, settings(scope, costs))):
            if scenario in store:
                found.setdefault(costs, Counter()).update(store[scenario]["seconds_by_part"])
                steps[costs] += store[scenario]["steps"]
    parts = sorted(set().union(*found.values()), key=lambda part: -max(s[part] / s.total() for s in found.values()))
    rows = [["a step, ms", *(f"{1e3 * seconds.total() / steps[costs]:.1f}" for costs, seconds in found.items())]]
    rows += [[part, *(f"{seconds[part] / seconds.total():.1%}" for seconds in found.values())] for part in parts]
    return Table("parts", f"Time of vllm by part, {scope.shapes[0]}, highest load", ["part", *found], rows)


def outside_table(store: ResultStore, scope: Scope) -> Table:
    """Prices that had to be extrapolated, for each step of vllm at the highest load of the first shape."""
    found: dict[str, Counter[str]] = {}
    steps: Counter[str] = Counter()
    for costs in COST_SETS:
        for scenario in at_load("highest", of_first_shape(scope, settings(scope, costs))):
            if scenario in store:
                found.setdefault(costs, Counter()).update(store[scenario]["outside"])
                steps[costs] += store[scenario]["steps"]
    operations = sorted(set().union(*found.values()))
    rows = [[name, *(f"{count[name] / steps[costs]:.2f}" for costs, count in found.items())] for name in operations]
    return Table("outside", "Extrapolated prices per step, by operation", ["operation", *found], rows)


def work_table(store: ResultStore, scope: Scope) -> Table:
    """What it took."""
    seconds = np.array([result["wall_s"] for result in store])
    served = sum(result["clients"]["requests"] for result in store if "clients" in result)
    rows = [
        ["results", f"{len(seconds):,}"],
        ["simulated requests", f"{served:,}"],
        ["time of one core, minutes", f"{seconds.sum() / 60:,.1f}"],
        ["median result, s", f"{np.median(seconds):.2f}" if len(seconds) else NOTHING],
    ]
    return Table("work", "Computed", ["", ""], rows)


def topics_table(store: ResultStore, scope: Scope) -> Table:
    """Sources that keep their topics, beside the same settings without."""

    def rows() -> Iterable[Row]:
        for costs in VARIED:
            for system in COMPARED:
                yield against((costs, system), system, with_topics(scope, costs))

    means: tuple[Measure, ...] = ("imbalance", "remote_share", "exchange_share")
    title = "Persistence 0.8, first shape, lowest and highest load: changes against vllm"
    return runs_table(store, "topics", title, ("costs", "system"), rows(), means, ("e2e", "ttft", "tpot"))


def exchange_table(store: ResultStore, scope: Scope) -> Table:
    """All-gather and reduce-scatter in place of all-to-all."""

    def rows() -> Iterable[Row]:
        for costs in VARIED:
            for system in GATHER_SYSTEMS:
                yield against((costs, system), system, with_gather(scope, costs))

    means: tuple[Measure, ...] = ("tpot", "imbalance", "exchange_share")
    title = "All-gather, first shape, lowest and highest load: changes against vllm"
    return runs_table(store, "exchange", title, ("costs", "system"), rows(), means, ("e2e", "ttft", "tpot"))


def requests_table(store: ResultStore, scope: Scope) -> Table:
    """Figure 2: a short and a long request, each alone. The paper gives 18.75 and 187.5 MiB, and no times."""
    rows = []
    for task in single_requests():
        if task in store:
            found = store[task]
            times = (f"{1e3 * found['clients'][name]:.2f}" for name in ("ttft_mean_s", "tpot_mean_s"))
            rows.append([task.costs, f"{task.prompt_tokens:,}", f"{found['kv_mib']:.2f}", *times])
    columns = ["costs", "prompt tokens", "KV cache, MiB (exact)", "TTFT, ms", "TPOT, ms"]
    return Table("requests", "One request alone", columns, rows)


def traffic_table(store: ResultStore, scope: Scope) -> Table:
    """Figure 4: how uneven experts are, and what leaves its source."""
    rows = []
    for scenario in static_runs(scope):
        if (task := ExpertCounts(scenario)) in store:
            shape = traffic_shape(store[task])
            layer, source = np.unravel_index(shape.remote_LS.argmax(), shape.remote_LS.shape)
            hottest_L = shape.relative_LE.max(axis=1)
            cells = [f"{scenario.routing.persistence:g}", f"{np.median(hottest_L):.1f}", f"{hottest_L.max():.1f}"]
            cells += [f"{shape.imbalance_L.mean():.2f}", f"{shape.imbalance_L.max():.2f}", f"{shape.remote_share:.1%}"]
            rows.append([*cells, f"{shape.remote_LS.max():.1%} (layer {layer}, source {source})"])
    columns = ["persistence", "hottest expert, median layer", "worst layer", "fullest rank, mean layer", "worst layer"]
    title = "Contiguous placement. Paper: 83.4 % (layer 23, source 0) and 66.5 % (layer 36, source 1) remote"
    return Table("traffic", title, [*columns, "remote share", "most remote"], rows)


def calibration_table(store: ResultStore, scope: Scope) -> Table:
    """Figure 6: greedy beside the exact solver, by weights."""
    rows = []
    for task in calibration_points(scope):
        if task in store:
            greedy, exact = store[task]["gimbal"], store[task]["exact"]
            cells = [f"({1:g}, {task.beta:g}, {task.gamma:g})", f"{greedy['same']:.1%}", f"{greedy['comm_gap']:+.2%}"]
            rows.append([*cells, f"{exact['moved']:.1%}", f"{exact['fullest']:.3f}", f"{greedy['fullest']:.3f}"])
    columns = ["alpha, beta, gamma", "same rank as exact", "comm over exact's", "exact moves", "exact's fullest"]
    title = "Weights beside the exact solver. Paper, at its (1, 0.0025, 1): over 80 % the same, comm within 0.6 %"
    return Table("calibration", title, [*columns, "greedy's fullest"], rows)


def against(labels: Sequence[str], system: str, grid: Sequence[Scenario], baseline: str = REFERENCE) -> Row:
    """A system beside another one in the same settings."""
    return Row(labels, under_system(system, grid), under_system(baseline, grid))
