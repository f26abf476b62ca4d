"""Comparison of placement policies on counted traffic, for ``gimbal place``: answers, tables and a picture.

Axes: L MoE layers, S sources (DP engines), E experts, R ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.table import Column, Table

from gimbal_jax.config import MeshConfig, OfflinePolicy, PlacementConfig, PlacementPolicy
from gimbal_jax.scheduler.baselines.moetuner import moetuner_placement
from gimbal_jax.scheduler.baselines.sem_moe import sem_moe_plan
from gimbal_jax.scheduler.counts_file import CountsFile, load_counts
from gimbal_jax.scheduler.distance import distance_SR
from gimbal_jax.scheduler.objective import Objective, window_objective
from gimbal_jax.scheduler.placement import assign_slots, propose
from gimbal_jax.scheduler.traffic import far_tokens_L, merge_windows, rank_of_expert, remote_tokens_L

WORST_LAYERS = 5


@dataclass(frozen=True, eq=False)
class Answer:
    """Placement of one policy, and the objective that scores it."""

    name: str
    objective: Objective
    counts_LSE: np.ndarray
    """Traffic of the objective."""
    mesh: MeshConfig
    slot_of_expert_LE: np.ndarray
    seconds: float
    """Time of the policy, for all layers."""

    @property
    def rank_LE(self) -> np.ndarray:
        return rank_of_expert(self.slot_of_expert_LE, self.mesh.ranks)

    @property
    def cost_L(self) -> np.ndarray:
        return self.objective.cost_L(self.rank_LE)

    @property
    def comm_L(self) -> np.ndarray:
        return self.objective.comm_L(self.rank_LE)

    @property
    def remote_L(self) -> np.ndarray:
        """Share of each layer's expert tokens that leave the ranks of their source."""
        return remote_tokens_L(self.counts_LSE, self.slot_of_expert_LE, self.mesh.ranks) / self._total_L

    @property
    def far_L(self) -> np.ndarray:
        """Share of each layer's expert tokens that leave the node of their source."""
        return far_tokens_L(self.counts_LSE, self.slot_of_expert_LE, self.mesh) / self._total_L

    @property
    def fullest_L(self) -> np.ndarray:
        """Load of the fullest rank over the mean."""
        return self.objective.load_LR(self.rank_LE).max(axis=1)

    @property
    def moves_LE(self) -> np.ndarray:
        return self.rank_LE != self.objective.old_rank_LE

    def of_layers(self, layers: np.ndarray) -> Answer:
        return replace(
            self,
            objective=self.objective.of_layers(layers),
            counts_LSE=self.counts_LSE[layers],
            slot_of_expert_LE=self.slot_of_expert_LE[layers],
        )

    @property
    def _total_L(self) -> np.ndarray:
        return np.maximum(self.counts_LSE.sum(axis=(1, 2)), 1)


@dataclass(frozen=True)
class Agreement:
    """An answer compared with the exact one."""

    excess: float
    """Cost over the exact answer's, less 1: mean over layers."""
    worst_excess: float
    same: float
    """Share of the experts that are on the same rank."""
    same_moves: float
    """Share of the experts moved by the exact answer that the other moves to the same rank; 1 if there are none."""
    comm_gap: float
    """The objective's comm over that of the exact answer, less 1."""


def agreement(answer: Answer, exact: Answer) -> Agreement:
    """Compare two answers for the same layers."""
    excess_L = answer.cost_L / np.maximum(exact.cost_L, 1e-12) - 1
    same_LE, moves_LE = answer.rank_LE == exact.rank_LE, exact.moves_LE
    return Agreement(
        excess=float(excess_L.mean()),
        worst_excess=float(excess_L.max()),
        same=float(same_LE.mean()),
        same_moves=float(same_LE[moves_LE].mean()) if moves_LE.any() else 1.0,
        comm_gap=float(answer.comm_L.sum() / max(exact.comm_L.sum(), 1e-12) - 1),
    )


def load_windows(paths: Sequence[Path]) -> CountsFile:
    """Read the windows of several counts files, one after the other, as if one file had them all.

    A folder stands for its .npz files, sorted by name. Offline profiles (transitions, request counts) are kept only if
    there is a single file.

    Raises:
      CountsFileError, OSError: a file cannot be read.
      ValueError: files of different models or meshes, or a folder without files.
    """
    files: dict[Path, CountsFile] = {}
    for path in paths:
        inside = sorted(path.glob("*.npz")) if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"--counts {path}: the folder has no .npz files")
        files |= {one: load_counts(one) for one in inside}
    (first_path, first), *others = files.items()
    for path, file in others:
        if (file.counts_WLSE.shape[1:], file.ranks) != (first.counts_WLSE.shape[1:], first.ranks):
            shapes = [
                "{} layers, {} sources, {} experts".format(*one.counts_WLSE.shape[1:]) + f" on {one.ranks} ranks"
                for one in (file, first)
            ]
            raise ValueError(f"--counts {path}: {shapes[0]}, but {first_path} has {shapes[1]}")
    if not others:
        return first
    every = files.values()
    return CountsFile(
        np.concatenate([file.counts_WLSE for file in every]),
        np.concatenate([file.slot_of_expert_WLE for file in every]),
        first.meta,
    )


def one_window(file: CountsFile, window: int) -> CountsFile:
    """Return the file with this window only. ValueError if it does not have it."""
    windows = len(file.counts_WLSE)
    if not 0 <= window < windows:
        raise ValueError(f"window must be from 0 to {windows - 1}, not {window}")
    one = slice(window, window + 1)
    return replace(file, counts_WLSE=file.counts_WLSE[one], slot_of_expert_WLE=file.slot_of_expert_WLE[one])


def spaced_layers(file: CountsFile, most: int | None) -> np.ndarray:
    """Return the numbers of at most ``most`` layers of the file, evenly spaced; None takes all."""
    layers = file.counts_WLSE.shape[1]
    return np.linspace(0, layers - 1, min(layers, most or layers)).round().astype(int)


def policy_answer(
    policy: PlacementPolicy | OfflinePolicy, file: CountsFile, config: PlacementConfig, nodes: int = 1
) -> Answer:
    """Return the answer of a policy to all windows of the file together, from the placement of the last one.

    All policies are scored under ``config``, also those with weights of their own. ``sem_moe`` also decides which
    engine gets each request, so it is scored on the traffic that follows from that.

    Args:
      policy: name of the policy.
      file: windows, with the profiles that offline policies need.
      config: weights of the objective.
      nodes: nodes that the ranks of the file are on, evenly and in order.

    Raises:
      ValueError: the file lacks a profile that the policy needs, or the ranks do not divide over the nodes.
    """
    counts_LSE, slot_LE, ranks = merge_windows(file.counts_WLSE), file.slot_of_expert_WLE[-1], file.ranks
    sources = counts_LSE.shape[1]
    mesh = MeshConfig(sources, ranks // sources, nodes)
    apart_SR = distance_SR(mesh, config.far_distance)
    began = time.perf_counter()
    if policy == "moetuner":
        if file.transitions_LEE is None:
            raise ValueError("moetuner needs a counts file with transitions, from an offline profile")
        new_slot_LE = moetuner_placement(counts_LSE.sum(axis=1), file.transitions_LEE, ranks)
    elif policy == "sem_moe":
        if file.request_counts_NLE is None:
            raise ValueError("sem_moe needs a counts file with request_counts, from an offline profile")
        plan = sem_moe_plan(file.request_counts_NLE, sources, ranks, np.random.default_rng(0))
        new_slot_LE = plan.slot_of_expert_LE
        counts_LSE = np.stack([file.request_counts_NLE[plan.engine_N == s].sum(axis=0) for s in range(sources)], axis=1)
    else:
        new_slot_LE = propose(counts_LSE, slot_LE, mesh, replace(config, policy=policy)).slot_of_expert_LE
    seconds = time.perf_counter() - began
    objective = window_objective(counts_LSE, slot_LE, apart_SR, config)
    return Answer(policy, objective, counts_LSE, mesh, new_slot_LE, seconds)


def exact_reference(staying: Answer, time_limit_s: float, progress: Callable[[int, int], None]) -> tuple[Answer, str]:
    """Return the answer of the exact solver, from the current placement, and its report in one line."""
    from gimbal_jax.scheduler.exact import exact_answer  # loads scipy

    found = exact_answer(staying.objective, time_limit_s=time_limit_s, progress=progress)
    states = ", ".join(f"{found.status_L.count(state)} {state}" for state in sorted(set(found.status_L)))
    line = (
        f"exact: {states}; gap {found.gap_L.mean():.3%} on average, {found.gap_L.max():.3%} at worst; "
        f"{found.seconds_L.mean():.2f} s a layer, {found.seconds_L.max():.2f} s at worst"
    )
    slot_LE = assign_slots(found.rank_LE, staying.slot_of_expert_LE, staying.mesh.ranks)
    return replace(staying, name="exact", slot_of_expert_LE=slot_LE, seconds=float(found.seconds_L.sum())), line


def tables(answers: Sequence[Answer], layers: np.ndarray, exact: Answer | None) -> list[Table]:
    """Return tables of the placements, their distance from ``exact``, and the worst layers of the second answer.

    The first answer is the current placement; ``layers`` are the numbers of the answers' layers.
    """
    shown = [_summary([*answers, *([exact] if exact else [])])]
    if exact:
        shown.append(_against_exact(answers, exact))
    return [*shown, _worst_layers(answers[1], layers, exact)]


def _summary(answers: Sequence[Answer]) -> Table:
    layers = len(answers[0].rank_LE)
    table = Table(Column("", no_wrap=True), title=f"Placements, mean of {layers} MoE layers (mean rank load = 1)")
    several = answers[0].mesh.nodes > 1
    for column in ["objective", "remote", *(["far"] if several else []), "load term", "fullest", "moved", "ms"]:
        table.add_column(column, justify="right")
    for answer in answers:
        table.add_row(
            answer.name,
            f"{answer.cost_L.mean():.4f}",
            f"{answer.remote_L.mean():.1%}",
            *([f"{answer.far_L.mean():.1%}"] if several else []),
            f"{answer.objective.load_L(answer.rank_LE).mean():.4f}",
            f"{answer.fullest_L.mean():.3f}",
            f"{answer.moves_LE.sum():,} ({answer.moves_LE.mean():.0%})",
            f"{answer.seconds * 1e3:,.1f}",
        )
    return table


def _against_exact(answers: Sequence[Answer], exact: Answer) -> Table:
    table = Table(Column("", no_wrap=True), title="Against the exact answer")
    for column in ["objective", "at worst", "same rank", "moved to the same", "comm"]:
        table.add_column(column, justify="right")
    for answer in answers:
        found = agreement(answer, exact)
        table.add_row(
            answer.name,
            f"{found.excess:+.2%}",
            f"{found.worst_excess:+.2%}",
            f"{found.same:.1%}",
            f"{found.same_moves:.1%}",
            f"{found.comm_gap:+.2%}",
        )
    return table


def _worst_layers(answer: Answer, layers: np.ndarray, exact: Answer | None) -> Table:
    """Return the layers in which an answer is farthest above the exact one or, without one, least even."""
    by_L = answer.cost_L - exact.cost_L if exact else answer.fullest_L
    table = Table("layer", title=f"{answer.name}, worst layers: " + ("farthest above exact" if exact else "least even"))
    for column in ["objective", "remote", "fullest", *(["over exact", "same rank"] if exact else [])]:
        table.add_column(column, justify="right")
    for index in np.argsort(-by_L, kind="stable")[:WORST_LAYERS]:
        one = answer.of_layers(np.array([index]))
        cells = [f"{one.cost_L[0]:.4f}", f"{one.remote_L[0]:.1%}", f"{one.fullest_L[0]:.3f}"]
        if exact:
            found = agreement(one, exact.of_layers(np.array([index])))
            cells += [f"{found.excess:+.2%}", f"{found.same:.1%}"]
        table.add_row(str(layers[index]), *cells)
    return table


def draw(answers: Sequence[Answer], layers: np.ndarray, path: Path) -> None:
    """Write a picture: the load of every rank in every layer, a panel per answer, and the remote shares below."""
    figure = Figure(figsize=(max(8.0, 2.2 * len(answers)), 8), layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=[3, 2])[:, 0]
    panels = above.subplots(1, len(answers), sharey=True, squeeze=False)[0]
    loads = [answer.objective.load_LR(answer.rank_LE) for answer in answers]
    spread = max(0.01, *(float(np.abs(load_LR - 1).max()) for load_LR in loads))
    for axes, answer, load_LR in zip(panels, answers, loads, strict=True):
        image = axes.imshow(load_LR, aspect="auto", cmap="RdBu_r", vmin=1 - spread, vmax=1 + spread)
        axes.set_title(f"{answer.name}\nfullest {answer.fullest_L.mean():.3f} x mean", fontsize=9)
        axes.set_xlabel("rank")
        axes.set_xticks(range(0, load_LR.shape[1], max(1, load_LR.shape[1] // 8)))
    panels[0].set_ylabel("MoE layer")
    panels[0].set_yticks(range(len(layers)), [str(layer) for layer in layers], fontsize=6)
    above.colorbar(image, ax=panels, label="load, mean rank = 1")
    axes = below.subplots()
    for answer in answers:
        axes.plot(range(len(layers)), answer.remote_L, label=f"{answer.name}: {answer.remote_L.mean():.1%}")
    axes.set_xticks(range(len(layers)), [str(layer) for layer in layers], fontsize=6)
    axes.set_xlabel("MoE layer")
    axes.set_ylabel("share of expert tokens that are remote")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
