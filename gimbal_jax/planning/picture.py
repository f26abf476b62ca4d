"""A picture of a mesh: one card a device, drawn by engine, in a frame for each node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.patches import FancyBboxPatch, Rectangle

from gimbal_jax.config import ModelConfig
from gimbal_jax.planning.show import Shard, ranges

CELLS_PER_LINE = 16
CARDS_PER_ROW = 4
"""Most cards side by side: a picture of 16 devices fits a screen."""


def draw_mesh(title: str, model: ModelConfig, held: Sequence[Shard], path: Path) -> None:
    """Write a picture: devices as cards with heads, vocabulary and experts, in order of engines, node by node.

    The colour of an expert is that of the device that holds it without a placement, so that moved ones stand out.
    """
    engines, nodes = held[-1].engine + 1, held[-1].node + 1
    per_node, slots = len(held) // nodes, len(held[0].experts)
    columns = max(n for n in range(1, CARDS_PER_ROW + 1) if min(len(held) // engines, per_node) % n == 0)
    rows = -(-per_node // columns)
    lines = -(-slots // CELLS_PER_LINE)
    width, height = 4.2 * columns + 0.6, (1.5 + 0.24 * lines) * rows * nodes + 0.9 + 0.5 * nodes * (nodes > 1)
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    home = colormaps["Spectral"](np.linspace(0.1, 0.9, len(held)))
    grids = [area.subplots(rows, columns, squeeze=False).flat for area in _node_areas(figure, nodes)]
    for axes in (axes for grid in grids for axes in grid):
        axes.set_axis_off()
    for shard in held:
        axes = grids[shard.node][shard.rank % per_node]
        _card(axes, shard, lines)
        for slot, expert in enumerate(shard.experts):
            _expert(
                axes, slot, expert, home[expert * len(held) // model.num_experts], moved=expert // slots != shard.rank
            )
    figure.savefig(path, dpi=150)


def _node_areas(figure: Figure, nodes: int) -> Sequence[FigureBase]:
    """Return the part of the figure for each node, with a name and a tint if there are several."""
    if nodes == 1:
        return [figure]
    areas = figure.subfigures(nodes, 1, squeeze=False, hspace=0.02)[:, 0]
    for node, area in enumerate(areas):
        area.set_facecolor("#e8eef7")
        area.suptitle(f"node {node}", fontsize=11, fontweight="bold", x=0.01, ha="left")
    return list(areas)


def _card(axes: Axes, shard: Shard, lines: int) -> None:
    axes.set_xlim(-0.6, CELLS_PER_LINE + 0.6)
    axes.set_ylim(lines + 0.8, -5.4)
    box = (-0.4, -5.2), CELLS_PER_LINE + 0.8, lines + 5.8
    axes.add_patch(
        FancyBboxPatch(*box, boxstyle="round,pad=0,rounding_size=0.4", facecolor="#f7f7f9", edgecolor="#888")
    )
    copies = f" ({shard.kv_copies} copies)" if shard.kv_copies > 1 else ""
    axes.text(0, -4.0, f"device {shard.rank}", fontsize=11, fontweight="bold", va="center")
    axes.text(CELLS_PER_LINE, -4.0, f"engine {shard.engine}", fontsize=10, ha="right", va="center", color="#555")
    text = f"heads {ranges(shard.heads)}    KV heads {ranges(shard.kv_heads)}{copies}"
    axes.text(0, -2.6, text, fontsize=9, va="center")
    axes.text(0, -1.5, f"vocabulary {ranges(shard.vocabulary)}", fontsize=9, va="center")
    axes.text(0, -0.5, "experts", fontsize=9, va="center")


def _expert(axes: Axes, slot: int, expert: int, colour: np.ndarray, *, moved: bool) -> None:
    x, y = slot % CELLS_PER_LINE, slot // CELLS_PER_LINE
    edge = ("black", 1.4) if moved else ("white", 0.6)
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor=edge[0], linewidth=edge[1], zorder=2 + moved))
    dark = float(colour[:3] @ np.array([0.299, 0.587, 0.114])) < 0.55
    axes.text(
        x + 0.5,
        y + 0.52,
        str(expert),
        fontsize=5.5,
        ha="center",
        va="center",
        color="white" if dark else "black",
        zorder=4,
    )
