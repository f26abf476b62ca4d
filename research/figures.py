"""The paper's figures 2 to 12, drawn from simulated runs in the paper's form.

The paper's text calls throughput, ablation and running requests all "Figure 12". Here they are figures 10, 11 and 12.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from gimbal_jax.simulation.scenario import REFERENCE, Scenario
from gimbal_jax.simulation.workload import TRACES, length_table
from research.comparison import Measure, at_load, changes, estimate, load_of, under_system, value
from research.experiments import (
    ABLATION,
    BETAS,
    CALIBRATION,
    COMPARED,
    COST_SETS,
    GAMMAS,
    PAPER_SYSTEMS,
    PEERS,
    VARIED,
    Scope,
    calibration_points,
    of_first_shape,
    settings,
    single_requests,
    static_runs,
)
from research.plots import (
    TTFT_TPOT,
    Drawn,
    bar,
    colour,
    heat_map,
    label,
    lines_by_load,
    panels,
    plain,
    ratio_bars,
    value_bars,
)
from research.store import ResultStore
from research.study_figures import STUDIES
from research.tasks import ExpertCounts
from research.traffic_shape import traffic_shape


def draw_figures(store: ResultStore, scope: Scope, names: Sequence[str], folder: Path) -> Iterator[Path]:
    """Write the pictures of the named figures and studies that have results, and yield their paths."""
    draws: Mapping[str, Callable[[ResultStore, Scope], Drawn]] = {
        "2": draw_lengths,
        "4": draw_traffic,
        "6": draw_calibration,
        "8": draw_calibrated,
        "9": draw_latencies,
        "10": draw_throughput,
        "11": draw_ablation,
        "12": draw_pressure,
        **STUDIES,
    }
    for name in names:
        for file, figure in draws[name](store, scope):
            path = folder / f"{file}.png"
            figure.savefig(path, dpi=130)
            yield path


def draw_lengths(store: ResultStore, scope: Scope) -> Drawn:
    """Draw figure 2: prompt lengths of the traces, and the costs of a short and a long request."""
    tasks = [task for task in single_requests() if task in store]
    if not tasks:
        return
    figure = Figure(figsize=(12, 3), layout="constrained")
    traces, *others = figure.subplots(1, 4)
    for number, trace in enumerate(TRACES):
        tokens = np.sort(length_table(trace).input_N)
        traces.plot(tokens, np.arange(1, len(tokens) + 1) / len(tokens), label=trace, color=colour("", number))
    traces.set_xscale("log")
    traces.set_xlabel("prompt tokens", fontsize=8)
    traces.set_ylabel("share of requests", fontsize=8)
    traces.legend(fontsize=7, frameon=False)
    plain(traces)
    readings: list[tuple[str, Callable[[Mapping[str, Any]], float]]] = [
        ("KV cache, MiB (exact)", lambda found: found["kv_mib"]),
        ("TTFT, ms (simulated)", lambda found: 1e3 * found["clients"]["ttft_mean_s"]),
        ("TPOT, ms (simulated)", lambda found: 1e3 * found["clients"]["tpot_mean_s"]),
    ]
    for axes, (title, read) in zip(others, readings, strict=True):
        for place, task in enumerate(tasks):
            height = read(store[task])
            axes.bar(place, height, 0.75, color=colour("", place % 2))
            axes.annotate(f"{height:.4g}", (place, height), ha="center", va="bottom", fontsize=6)
        ticks = [f"{task.prompt_tokens:,} {task.costs}" for task in tasks]
        axes.set_xticks(range(len(tasks)), ticks, rotation=60, ha="right")
        axes.set_title(title, fontsize=9)
        plain(axes).tick_params(axis="x", labelsize=6)
    figure.suptitle("Prompt lengths, and one request alone by its prompt tokens and costs", fontsize=10)
    yield "figure_2", figure


def draw_traffic(store: ResultStore, scope: Scope) -> Drawn:
    """Draw figure 4: load of experts, and tokens that leave their source, under the contiguous placement."""
    tasks = [task for scenario in static_runs(scope) if (task := ExpertCounts(scenario)) in store]
    found = {task.scenario.routing.persistence: traffic_shape(store[task]) for task in tasks}
    if not found:
        return
    figure = Figure(figsize=(13, 6), layout="constrained")
    heat, *by_persistence = figure.subplots(1, 1 + len(found), width_ratios=[2.4, *([1] * len(found))])
    relative_LE = found[min(found)].relative_LE
    image = heat.imshow(relative_LE, aspect="auto", cmap="viridis", vmax=np.percentile(relative_LE, 99.5))
    heat.set_xlabel("expert", fontsize=8)
    heat.set_ylabel("MoE layer", fontsize=8)
    heat.set_title(f"tokens over the layer's mean; hottest {relative_LE.max():.1f}", fontsize=9)
    figure.colorbar(image, ax=heat, shrink=0.8)
    for axes, (persistence, shape) in zip(by_persistence, found.items(), strict=True):
        layers = np.arange(len(shape.remote_LS))
        for source, remote_L in enumerate(shape.remote_LS.T):
            axes.plot(100 * remote_L, layers, color=colour("", source), label=f"source {source}", linewidth=1)
        for paper, source in ((83.4, 0), (66.5, 1)):
            axes.axvline(paper, color=colour("", source), linestyle=":", linewidth=1)
        axes.set_xlim(20, 90)
        axes.invert_yaxis()
        axes.set_xlabel("remote expert tokens, %", fontsize=8)
        axes.set_title(f"persistence {persistence:g}: {shape.remote_share:.1%}", fontsize=9)
        plain(axes).legend(fontsize=7, frameon=False)
    figure.suptitle("Simulated traffic, contiguous placement (dotted: the paper's two layers)", fontsize=10)
    yield "figure_4", figure


def draw_calibration(store: ResultStore, scope: Scope) -> Drawn:
    """Draw figure 6: the online heuristic compared with the exact solver, over the weights."""
    found = {(task.beta, task.gamma): store[task] for task in calibration_points(scope) if task in store}
    if len(found) < len(BETAS) * len(GAMMAS):
        return
    figure = Figure(figsize=(11, 4), layout="constrained")
    maps = [
        ("share of exact's choices", "gimbal", "same"),
        ("communication over exact's", "gimbal", "comm_gap"),
        ("experts that exact moves", "exact", "moved"),
    ]
    for axes, (title, policy, name) in zip(figure.subplots(1, len(maps)), maps, strict=True):
        values = np.array([[found[beta, gamma][policy][name] for gamma in GAMMAS] for beta in BETAS])
        heat_map(axes, values, BETAS, GAMMAS)
        axes.set_title(title, fontsize=9)
    figure.suptitle("Greedy compared with the exact solver, alpha = 1, synthetic windows", fontsize=10)
    yield "figure_6", figure


def draw_calibrated(store: ResultStore, scope: Scope) -> Drawn:
    """Draw figure 8: the shapes of lengths, and gimbal with and without calibrated weights."""
    for costs in COST_SETS:
        grid = _run_of(store, settings(scope, costs), CALIBRATION)
        if grid:
            figure = Figure(figsize=(max(2.6 * len(scope.shapes), 7), 7), layout="constrained")
            rows = figure.subplots(3, len(scope.shapes), squeeze=False)
            for axes, shape in zip(rows[0], scope.shapes, strict=True):
                table = length_table(shape)
                axes.hist(table.input_N, bins=30, weights=100 * table.weight_N, color=colour("gimbal"))
                axes.set_xlabel("prompt tokens", fontsize=8)
                axes.set_title(shape, fontsize=9)
                plain(axes)
            rows[0][0].set_ylabel("requests, %", fontsize=8)
            _by_shape(rows[1:], store, scope, grid, CALIBRATION, TTFT_TPOT, titles=False)
            figure.suptitle(f"Calibrated weights of placement and (1, 1, 1), simulated, costs {costs}", fontsize=10)
            yield f"figure_8_{costs}", figure


def draw_latencies(store: ResultStore, scope: Scope) -> Drawn:
    """Draw figure 9: latencies by shape and load, and those of the later peers for the first shape."""
    measures: tuple[Measure, ...] = ("e2e", "ttft", "tpot", "p99_ttft")
    for costs in COST_SETS:
        grid = _run_of(store, settings(scope, costs), COMPARED)
        shapes = [shape for shape in scope.shapes if any(s.workload.lengths == shape for s in grid)]
        if grid:
            figure = Figure(figsize=(2.6 * max(len(shapes), 2), 9), layout="constrained")
            rows = figure.subplots(len(measures), len(shapes), squeeze=False)
            _by_shape(rows, store, scope, grid, (*PAPER_SYSTEMS, "gimbal+"), measures)
            figure.suptitle(f"Latencies, simulated, costs {costs}", fontsize=10)
            yield f"figure_9_{costs}", figure
        if costs in VARIED and (first := _run_of(store, of_first_shape(scope, grid), PEERS)):
            figure = Figure(figsize=(12, 3.4), layout="constrained")
            for axes, measure in panels(figure, measures):
                lines_by_load(axes, store, first, ("vllm", *PEERS, "gimbal", "gimbal+"), measure)
            figure.suptitle(f"Later peers, {scope.shapes[0]}, simulated, costs {costs}", fontsize=10)
            yield f"figure_9_peers_{costs}", figure


def draw_throughput(store: ResultStore, scope: Scope) -> Drawn:
    """Draw figure 10: throughput over vllm's by load, and requests/s at the highest load by shape."""
    for costs in COST_SETS:
        grid = _run_of(store, settings(scope, costs), PAPER_SYSTEMS)
        if not grid:
            continue
        figure = Figure(figsize=(11, 3.4), layout="constrained")
        ratio, raw = figure.subplots(1, 2)
        loads = sorted({load_of(scenario) for scenario in grid})
        shapes = list(dict.fromkeys(scenario.workload.lengths for scenario in grid))
        for number, system in enumerate(PAPER_SYSTEMS):
            place = 0.2 * (number - 1.5)
            for at, load in enumerate(loads):
                there = at_load(load, grid)
                runs = under_system(system, there)
                found = estimate(changes(store, runs, under_system(REFERENCE, there), "throughput"))
                bar(ratio, at + place, found, 1.0, colour(system), width=0.19)
            for at, shape in enumerate(shapes):
                runs = [s for s in under_system(system, at_load("highest", grid)) if s.workload.lengths == shape]
                height = np.mean([value(store, run, "throughput") for run in runs])
                raw.bar(at + place, height, 0.19, color=colour(system), label=system if at == 0 else None)
        ratio.set_xticks(range(len(loads)), [f"{load:g}" for load in loads])
        ratio.set_xlabel(_load_axis(grid), fontsize=8)
        ratio.set_ylabel("throughput over vllm's", fontsize=8)
        ratio.set_ylim(0.9, 1.1)
        raw.set_xticks(range(len(shapes)), shapes)
        raw.set_ylabel("requests/s at the highest load", fontsize=8)
        plain(ratio)
        raw.set_ylim(top=1.25 * raw.get_ylim()[1])
        plain(raw).legend(fontsize=7, frameon=False, ncols=4, loc="upper center")
        figure.suptitle(f"Throughput, simulated, costs {costs}", fontsize=10)
        yield f"figure_10_{costs}", figure


def draw_ablation(store: ResultStore, scope: Scope) -> Drawn:
    """Draw figure 11: TTFT and TPOT over vllm's, over all loads and shapes, with 95 % intervals."""
    for costs in COST_SETS:
        grid = _run_of(store, settings(scope, costs), ABLATION)
        if grid:
            figure = Figure(figsize=(9, 3.4), layout="constrained")
            for axes, measure in zip(figure.subplots(1, 2), TTFT_TPOT, strict=True):
                ratio_bars(axes, store, ABLATION, grid, measure)
            figure.suptitle(f"Ablation, simulated, costs {costs}", fontsize=10)
            yield f"figure_11_{costs}", figure


def draw_pressure(store: ResultStore, scope: Scope) -> Drawn:
    """Draw figure 12: running requests, KV cache use and prompt gap at the highest load."""
    measures: tuple[tuple[Measure, str], ...] = (("running", ".1f"), ("kv_use", ".2f"), ("prompt_gap", ".0f"))
    for costs in COST_SETS:
        grid = at_load("highest", _run_of(store, settings(scope, costs), ABLATION))
        if grid:
            figure = Figure(figsize=(12, 3.4), layout="constrained")
            for axes, (measure, form) in zip(figure.subplots(1, 3), measures, strict=True):
                value_bars(axes, store, ABLATION, grid, measure, form)
            figure.suptitle(f"Engines at the highest load, simulated, costs {costs}", fontsize=10)
            yield f"figure_12_{costs}", figure


def _by_shape(
    rows: np.ndarray,
    store: ResultStore,
    scope: Scope,
    grid: Sequence[Scenario],
    systems: Sequence[str],
    measures: Sequence[Measure],
    titles: bool = True,
) -> None:
    """Draw a row of panels per measure and a column per shape. ``titles`` writes the shape above each column."""
    shapes = [shape for shape in scope.shapes if any(s.workload.lengths == shape for s in grid)]
    for row, measure in zip(rows, measures, strict=True):
        for axes, shape in zip(row, shapes, strict=True):
            lines_by_load(axes, store, [s for s in grid if s.workload.lengths == shape], systems, measure)
        row[0].set_ylabel(label(measure), fontsize=8)
    if titles:
        for axes, shape in zip(rows[0], shapes, strict=True):
            axes.set_title(shape, fontsize=9)
    rows[0][0].legend(fontsize=7, frameon=False)


def _run_of(store: ResultStore, grid: Sequence[Scenario], systems: Sequence[str]) -> list[Scenario]:
    """Return the settings in which all of these systems were run, so that all are shown over equal settings."""
    return [s for s in grid if all(run in store for system in systems for run in under_system(system, [s]))]


def _load_axis(grid: Sequence[Scenario]) -> str:
    return "requests/s" if grid[0].share_of_capacity is None else "share of vLLM's capacity"
