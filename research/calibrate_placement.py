"""Calibrate the weights of the placement objective against the exact solver (paper 6, Figure 6).

Both studies use synthetic windows of four kinds and counts files of real servers (``--counts``). A window here is one
MoE layer of a synthetic router, or one layer of a file. The router draws every layer independently, so layers are as
independent as windows are.

- Sweep: heat maps over (beta, gamma) with alpha = 1, for both load terms. They show the share of the exact answer's
  choices that a policy also makes, and the relative difference of its communication.
- Quality: greedy, refined and eplb against the exact answer at a few weights over all windows, with the load of the
  fullest rank and the remote share. If nothing moves, the policies agree, but that is no success.

"raw tokens" is the paper's setting under another normalisation: tokens, squared tokens (mean over ranks) and experts
are not scaled. In our units its (1, 0.0025, 1) is (1, 0.0025 T / R**2, E / T), with T expert tokens of a layer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, get_args

import numpy as np
import typer
from matplotlib.figure import Figure
from rich.table import Column, Table

from gimbal_jax.cli.terminal import console, print_table, progress_bar
from gimbal_jax.config import LoadTerm, MeshConfig, PlacementConfig, PlacementPolicy
from gimbal_jax.planning.placements import Answer, agreement
from gimbal_jax.scheduler.counts_file import load_counts
from gimbal_jax.scheduler.distance import distance_SR
from gimbal_jax.scheduler.exact import exact_answer
from gimbal_jax.scheduler.objective import window_objective
from gimbal_jax.scheduler.placement import assign_slots, propose, static_placement
from gimbal_jax.scheduler.windows import WindowConfig, synthetic_windows
from research.plots import heat_map
from research.store import OUT

KINDS = {
    "diverse": WindowConfig(),
    "narrow": WindowConfig(topics=1),
    "topic-sticky": WindowConfig(persistence=1.0),
    "drifting": WindowConfig(persistence=0.8, drift=0.5),
}
POLICIES: tuple[PlacementPolicy, ...] = ("gimbal", "gimbal_refined", "eplb")
BETAS = (0.0025, 0.03, 0.1, 0.2, 0.5, 1.0, 10.0)
GAMMAS = (0.01, 0.03, 0.1, 0.3, 1.0)
QUALITY_WEIGHTS = {
    "paper": (1.0, 0.0025, 1.0),
    "uncalibrated": (1.0, 1.0, 1.0),
    "default": (PlacementConfig.alpha, PlacementConfig.beta, PlacementConfig.gamma),
    "few moves": (1.0, 0.2, 0.3),
    "paper's criterion": (1.0, 0.2, 0.1),
    "many moves": (1.0, 1.0, 0.02),
    "load above all": (1.0, 10.0, 0.03),
}
RANKS = 4
"""Ranks of the synthetic windows, over two sources, as on the paper's testbed."""


@dataclass(frozen=True, eq=False)
class Windows:
    """Layers of many windows, stored as the layers of one window."""

    kind_L: list[str]
    counts_LSE: np.ndarray
    slot_of_expert_LE: np.ndarray
    """Current placement."""
    mesh: MeshConfig

    def sample(self, size: int) -> Windows:
        """Return at most ``size`` evenly spaced layers, so that the sample contains all kinds."""
        index = np.linspace(0, len(self.kind_L) - 1, min(size, len(self.kind_L))).round().astype(int)
        kinds = [self.kind_L[i] for i in index]
        return Windows(kinds, self.counts_LSE[index], self.slot_of_expert_LE[index], self.mesh)


def synthetic(per_kind: int, seed: int = 0) -> Windows:
    """Return ``per_kind`` layers of each kind, with 128 experts.

    The current placement is the contiguous one. For "drifting" it is the placement that ``gimbal_refined`` chose from
    the previous window at the default weights.
    """
    counts, slots, kinds = [], [], []
    mesh = MeshConfig(WindowConfig.sources, RANKS // WindowConfig.sources)
    for kind, config in KINDS.items():
        windows = synthetic_windows(replace(config, layers=per_kind), np.random.default_rng(seed))
        slot_LE = static_placement(per_kind, config.experts, RANKS)
        counts_LSE = next(windows).counts_LSE
        if kind == "drifting":
            slot_LE = propose(counts_LSE, slot_LE, mesh, PlacementConfig("gimbal_refined")).slot_of_expert_LE
            counts_LSE = next(windows).counts_LSE
        counts.append(counts_LSE)
        slots.append(slot_LE)
        kinds += [kind] * per_kind
    return Windows(kinds, np.concatenate(counts), np.concatenate(slots), mesh)


def from_files(paths: Sequence[Path]) -> list[Windows]:
    """Return the windows of each file; each layer of each window counts as one window."""
    found = []
    for path in paths:
        file = load_counts(path)
        windows, layers, sources, experts = file.counts_WLSE.shape
        counts_LSE = file.counts_WLSE.reshape(windows * layers, sources, experts)
        slot_LE = file.slot_of_expert_WLE.reshape(windows * layers, experts)
        mesh = MeshConfig(sources, file.ranks // sources)
        found.append(Windows([path.name] * len(counts_LSE), counts_LSE, slot_LE, mesh))
    return found


@dataclass(frozen=True)
class Result:
    """One setting: the measures of each policy against the exact answer, and statistics of the solver."""

    load_term: LoadTerm
    weights: tuple[float, float, float]
    policies: dict[str, dict[str, float]]
    solver: dict[str, float]


def compare(windows: Windows, config: PlacementConfig, time_limit_s: float = 5.0, gap: float = 1e-3) -> Result:
    counts_LSE, slot_LE, mesh = windows.counts_LSE, windows.slot_of_expert_LE, windows.mesh
    objective = window_objective(counts_LSE, slot_LE, distance_SR(mesh, config.far_distance), config)
    solved = exact_answer(objective, time_limit_s=time_limit_s, gap=gap)
    staying = Answer("staying", objective, counts_LSE, mesh, slot_LE, 0.0)
    exact = replace(staying, name="exact", slot_of_expert_LE=assign_slots(solved.rank_LE, slot_LE, mesh.ranks))
    answers = [staying, exact]
    for policy in POLICIES:
        proposal = propose(counts_LSE, slot_LE, mesh, replace(config, policy=policy))
        answers.append(replace(staying, name=policy, slot_of_expert_LE=proposal.slot_of_expert_LE))
    policies = {
        answer.name: {
            **asdict(agreement(answer, exact)),
            "fullest": float(answer.fullest_L.mean()),
            "remote": float(answer.remote_L.mean()),
            "moved": float(answer.moves_LE.mean()),
        }
        for answer in answers
    }
    solver = {
        "windows": len(solved.cost_L),
        "optimal": solved.status_L.count("optimal"),
        "gap": float(solved.gap_L.mean()),
        "worst_gap": float(solved.gap_L.max()),
        "seconds": float(solved.seconds_L.mean()),
        "worst_seconds": float(solved.seconds_L.max()),
    }
    return Result(config.load_term, (config.alpha, config.beta, config.gamma), policies, solver)


def quality_table(name: str, results: Sequence[Result]) -> Table:
    worst_gap = max(result.solver["worst_gap"] for result in results)
    windows = results[0].solver["windows"]
    table = Table(
        Column(no_wrap=True),
        Column(no_wrap=True),
        title=f"{name}: {windows} windows, gap of exact at most {worst_gap:.2%}",
    )
    for column in ["over exact", "at worst", "as exact", "moves as exact", "comm gap", "moved", "fullest", "remote"]:
        table.add_column(column, justify="right")
    for result in results:
        alpha, beta, gamma = result.weights
        label = f"({alpha:g}, {beta:.4g}, {gamma:.4g}) {result.load_term}"
        for policy, row in result.policies.items():
            cells = [f"{row['excess']:+.2%}", f"{row['worst_excess']:+.2%}", f"{row['same']:.1%}"]
            cells += [f"{row['same_moves']:.1%}", f"{row['comm_gap']:+.2%}", f"{row['moved']:.1%}"]
            table.add_row(label, policy, *cells, f"{row['fullest']:.3f}", f"{row['remote']:.1%}")
            label = ""
        table.add_section()
    return table


def draw(sweep: Sequence[Result], path: Path) -> None:
    """Draw heat maps over (beta, gamma), one row per load term."""
    maps = [
        ("greedy: share of exact's choices", "gimbal", "same"),
        ("greedy: comm over exact's", "gimbal", "comm_gap"),
        ("greedy: objective over exact's", "gimbal", "excess"),
        ("refined: objective over exact's", "gimbal_refined", "excess"),
        ("exact: fullest rank / mean", "exact", "fullest"),
        ("exact: share of experts moved", "exact", "moved"),
    ]
    terms = sorted({result.load_term for result in sweep}, reverse=True)
    figure = Figure(figsize=(3.6 * len(maps), 3.4 * len(terms)), layout="constrained")
    grid = figure.subplots(len(terms), len(maps), squeeze=False)
    for term, row in zip(terms, grid, strict=True):
        found = {result.weights[1:]: result for result in sweep if result.load_term == term}
        for axes, (title, policy, measure) in zip(row, maps, strict=True):
            value_BG = np.array([[found[beta, gamma].policies[policy][measure] for gamma in GAMMAS] for beta in BETAS])
            heat_map(axes, value_BG, BETAS, GAMMAS, ".3f" if measure == "fullest" else ".1%")
            axes.set_title(f"{title}\n(load term: {term})", fontsize=9)
    figure.savefig(path, dpi=130)


def main(
    counts: Annotated[list[Path] | None, typer.Option(help="Counts file of a server. Can be repeated.")] = None,
    per_kind: Annotated[int, typer.Option(min=1, help="Synthetic windows of each kind.")] = 52,
    sweep_windows: Annotated[int, typer.Option(min=0, help="Windows at each point of the sweep; 0 skips it.")] = 16,
    out: Annotated[Path, typer.Option(help="Folder for tables, figure and JSON.")] = OUT / "calibration",
) -> None:
    """Sweep the weights against the exact solver, and compare the policies at some weights."""
    out.mkdir(parents=True, exist_ok=True)
    windows = synthetic(per_kind)
    groups = {"synthetic": windows, **{found.kind_L[0]: found for found in from_files(counts or [])}}
    tokens = float(windows.counts_LSE.sum(axis=(1, 2)).mean())
    raw_tokens = (1.0, 0.0025 * tokens / RANKS**2, windows.counts_LSE.shape[2] / tokens)
    settings: list[tuple[LoadTerm, tuple[float, float, float]]] = [
        *(("square", weights) for weights in [*QUALITY_WEIGHTS.values(), raw_tokens]),
        ("max", QUALITY_WEIGHTS["default"]),
    ]
    points = list(product(get_args(LoadTerm), BETAS, GAMMAS)) if sweep_windows else []

    sweep: list[Result] = []
    quality: dict[str, list[Result]] = {}
    with progress_bar("calibrating") as progress:
        total = len(points) + len(groups) * len(settings)
        for term, beta, gamma in points:
            config = PlacementConfig(alpha=1.0, beta=beta, gamma=gamma, load_term=term)
            sweep.append(compare(windows.sample(sweep_windows), config))
            progress(len(sweep), total)
        for (name, group), (term, (alpha, beta, gamma)) in product(groups.items(), settings):
            config = PlacementConfig(alpha=alpha, beta=beta, gamma=gamma, load_term=term)
            quality.setdefault(name, []).append(compare(group, config))
            progress(len(points) + sum(map(len, quality.values())), total)

    found = {"sweep": [asdict(r) for r in sweep], "quality": {k: [asdict(r) for r in v] for k, v in quality.items()}}
    (out / "calibration.json").write_text(json.dumps(found, indent=1))
    if sweep:
        draw(sweep, out / "calibration.png")
    for name, results in quality.items():
        print_table(quality_table(name, results))
    console.print(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
