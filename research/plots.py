"""Panels of the pictures of runs: lines by load, and bars with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.demo_report import RANK_COLOURS
from gimbal_jax.simulation.scenario import REFERENCE, Scenario
from research.comparison import MEASURES, Estimate, Measure, changes, estimate, load_of, under_system, value
from research.store import ResultStore

Drawn = Iterator[tuple[str, Figure]]
"""Names of files, without suffix, each with its figure."""
TTFT_TPOT: tuple[Measure, ...] = ("ttft", "tpot")

BLUE, YELLOW, RED, GREEN, PURPLE, SKY, BROWN, LEAF = RANK_COLOURS
COLOURS = {
    "vllm": "#444444",
    "moetuner": BROWN,
    "sem_moe": YELLOW,
    "gimbal_dp": SKY,
    "gimbal_ep": GREEN,
    "gimbal_no_collab": PURPLE,
    "gimbal": BLUE,
    "gimbal+": RED,
    "vllm_0_33": "#999999",
    "sglang": LEAF,
    "gimbal_uncalibrated": YELLOW,
}
"""Colour of each system in all pictures. Other systems take colours by their place in the legend."""


def colour(system: str, number: int = 0) -> str:
    """Return the colour of a system or, if it has none of its own, of its place in the legend."""
    return COLOURS.get(system, RANK_COLOURS[number % len(RANK_COLOURS)])


def plain(axes: Axes) -> Axes:
    """Hide the top and right spines, and return the axes."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    return axes


def lines_by_load(
    axes: Axes, store: ResultStore, settings: Sequence[Scenario], systems: Sequence[str], measure: Measure
) -> None:
    """Draw a line per system: the mean over seeds at each load, with the range of the seeds."""
    loads = sorted({load_of(scenario) for scenario in settings})
    by_share = any(scenario.share_of_capacity is not None for scenario in settings)
    for number, system in enumerate(systems):
        runs = under_system(system, settings)
        values = [[value(store, run, measure) for run in runs if load_of(run) == load] for load in loads]
        lines(axes, loads, values, system, colour(system, number))
    axes.set_xticks(loads, [f"{load:.0%}" if by_share else f"{load:g}" for load in loads])
    axes.set_xlabel("share of vLLM's capacity" if by_share else "requests/s", fontsize=8)


def lines(axes: Axes, x: Sequence[float], values: Sequence[Sequence[float]], label: str, shade: str) -> None:
    """Draw a line of the means of the values at each x, with their range."""
    known = [[v for v in at if np.isfinite(v)] or [np.nan] for at in values]
    axes.plot(x, [np.mean(at) for at in known], "o-", color=shade, label=label, linewidth=1.4, markersize=3)
    axes.fill_between(x, [min(at) for at in known], [max(at) for at in known], color=shade, alpha=0.12, linewidth=0)
    plain(axes)


def bar(axes: Axes, place: float, found: Estimate, offset: float, shade: str, width: float = 0.72) -> None:
    """Draw a bar with its interval, both raised by ``offset``."""
    spread = [[found.mean - found.low], [found.high - found.mean]]
    axes.bar(place, found.mean + offset, width, color=shade, yerr=spread, capsize=2, error_kw={"linewidth": 0.9})


def bars(axes: Axes, found: Mapping[str, Estimate], offset: float = 0.0, form: str = ".3g") -> None:
    """Draw a bar per name, with its interval and value. ``offset`` is added to all; 1 turns changes into ratios."""
    for number, (name, one) in enumerate(found.items()):
        bar(axes, number, one, offset, colour(name, number))
        axes.annotate(
            f"{one.mean + offset:{form}}",
            (number, one.high + offset),
            ha="center",
            va="bottom",
            fontsize=7,
            xytext=(0, 2),
            textcoords="offset points",
        )
    axes.set_xticks(range(len(found)), list(found), rotation=35, ha="right", fontsize=8)
    plain(axes)


def heat_map(
    axes: Axes, value_BG: np.ndarray, betas: Sequence[float], gammas: Sequence[float], form: str = ".1%"
) -> None:
    """Draw values [B, G] by weights of the placement objective, each with its number."""
    axes.imshow(value_BG, aspect="auto", cmap="viridis", origin="lower")
    for (row, column), number in np.ndenumerate(value_BG):
        box = {"facecolor": "white", "pad": 1, "linewidth": 0}
        axes.text(column, row, f"{number:{form}}", ha="center", va="center", fontsize=7, bbox=box)
    axes.set_xticks(range(len(gammas)), [f"{gamma:g}" for gamma in gammas])
    axes.set_yticks(range(len(betas)), [f"{beta:g}" for beta in betas])
    axes.set_xlabel("gamma (moves)", fontsize=8)
    axes.set_ylabel("beta (load)", fontsize=8)


def panels(figure: Figure, measures: Sequence[Measure]) -> Iterator[tuple[Axes, Measure]]:
    """Yield one panel per measure, titled with it. Afterwards the first one gets a legend, if it has labels."""
    row = figure.subplots(1, len(measures))
    for axes, measure in zip(row, measures, strict=True):
        yield axes, measure
        axes.set_title(label(measure), fontsize=9)
    if row[0].get_legend_handles_labels()[1]:
        row[0].legend(fontsize=7, frameon=False)


def value_bars(
    axes: Axes,
    store: ResultStore,
    systems: Sequence[str],
    grid: Sequence[Scenario],
    measure: Measure,
    form: str = ".3g",
) -> None:
    """Draw a bar per system: the mean of a measure over the settings."""
    bars(axes, {s: estimate([value(store, run, measure) for run in under_system(s, grid)]) for s in systems}, form=form)
    axes.set_ylabel(label(measure), fontsize=8)


def ratio_bars(
    axes: Axes, store: ResultStore, systems: Sequence[str], grid: Sequence[Scenario], measure: Measure
) -> None:
    """Draw a bar per system: a measure relative to vllm's in the same settings."""
    before = under_system(REFERENCE, grid)
    found = {system: estimate(changes(store, under_system(system, grid), before, measure)) for system in systems}
    bars(axes, found, offset=1.0, form=".3f")
    axes.axhline(1.0, color="#444444", linewidth=0.8, linestyle="--")
    axes.set_ylabel(f"{measure.upper()} over vllm's", fontsize=8)


def label(measure: Measure) -> str:
    """Return the label of a measure's axis."""
    return MEASURES[measure].label
