"""One frame of ``gimbal top``: the live view of a server, for rich to draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

# Name in the snapshot: its caption, its colour, and its letter without colours. The same as on the dashboard.
TERMS = {
    "running_prefill": ("prefill left", "#3d9bdc", "R"),
    "waiting_prefill": ("prefill waiting", "#8fd0f7", "W"),
    "compensation": ("sent, not seen yet", "#bd97d1", "C"),
    "kv": ("KV use", "#2fc296", "K"),
    "experts": ("expert pressure", "#f0b634", "E"),
}
STATES = {"serving": ("●", "green"), "warming": ("◌", "yellow"), "draining": ("◐", "yellow")}
OUTCOMES = {"applied": ("✓ applied", "green"), "migrating": ("➜ moving", "yellow"), "failed": ("✕ failed", "red")}
BLOCKS, SHADES = "▁▂▃▄▅▆▇█", " .:░▒▓█"
HEAT = np.array([[52, 128, 201], [44, 79, 112], [74, 77, 84], [178, 104, 32], [255, 190, 92]], float)
"""Colours of an eighth of an even share, an even share and eight times as much, with two between them."""
DECISIONS = 6
MAX_CELL = 4


def frame(data: dict[str, Any], width: int, rows: int | None, color: bool, lost: str = "") -> RenderableType:
    """Return the whole screen.

    Args:
      data: snapshot of the server.
      width: columns of the terminal.
      rows: lines of the terminal; None for as many as the frame takes.
      color: whether the terminal has colours.
      lost: reason for which the data are old; empty if they are not.
    """
    head, warnings, decisions = _head(data, lost, width), _warnings(data, lost), _decisions(data)
    title, legend, map_rows = _traffic_title(data, width), _legend(width, color), len(data["experts"]["layers"])
    if rows is not None:
        # 10: titles and scales without names of varying length, series, and empty lines.
        used = 10 + sum(map(len, (head, warnings, title, legend, data["engines"], decisions)))
        map_rows = min(map_rows, max(2, rows - used) * (2 if color else 1))  # a character holds two layers
    series, engines = _series(data, width), _engines(data, width, color)
    heat = _heat_map(data, width, map_rows, color, title)
    return Group(*head, *warnings, series, engines, *legend, heat, *decisions)


def flowed(parts: Sequence[Text], width: int, gap: str = "  ") -> list[Text]:
    """Join parts with ``gap``, in as many lines as they need; no part is broken."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + len(gap) + part.cell_len <= width:
            lines[-1].append(gap).append_text(part)
        else:
            lines.append(Text(no_wrap=True, overflow="ellipsis").append_text(part))
    return lines


def seconds(value: float | None) -> str:
    """Return a duration in about three digits; a dash for None."""
    if value is None:
        return "-"
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.{1 if value < 0.01 else 0}f} ms"
    return f"{value:.{2 if value < 10 else 1}f} s" if value < 60 else span(value)


def span(value: float) -> str:
    """Return a long duration in its two largest units."""
    whole = int(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole // 60 % 60} min"
    return f"{whole // 86400} d {whole // 3600 % 24} h"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return the last ``width`` values as blocks from zero to their maximum; blanks for None."""
    last = values[-width:]
    top = max((value for value in last if value is not None), default=0.0)
    scale = (len(BLOCKS) - 1) / top if top > 0 else 0.0
    return "".join(" " if value is None else BLOCKS[round(value * scale)] for value in last)


def stacked(values: Sequence[float], full: float, width: int) -> list[int]:
    """Return the characters of each part of a bar that ``full`` would fill; together they are as long as the sum."""
    ends = [round(width * min(1.0, total / full)) if full > 0 else 0 for total in np.cumsum(values)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def shares(tokens_LP: np.ndarray, ranks: int, rows: int, width: int) -> np.ndarray:
    """Return the map in ``rows`` and at most ``width`` columns, with a column of NaN between ranks if there is room.

    Values are tokens over an even share. If several cells share a place, the largest of them is shown.
    """
    slots = tokens_LP.shape[1]
    even_L1 = np.maximum(tokens_LP.sum(axis=1, keepdims=True) / slots, 1e-9)
    share_LP = tokens_LP / even_L1
    share_LP = np.stack([part.max(axis=0) for part in np.array_split(share_LP, rows)])
    gap = 2 * ranks <= width
    columns = max(1, (width - ranks * gap) // ranks)
    parts = []
    for rank_LP in np.split(share_LP, ranks, axis=1):
        per_rank = rank_LP.shape[1]
        if per_rank <= columns:
            parts.append(np.repeat(rank_LP, min(MAX_CELL, columns // per_rank), axis=1))
        else:
            parts.append(np.stack([part.max(axis=1) for part in np.array_split(rank_LP, columns, axis=1)], axis=1))
        if gap:
            parts.append(np.full((rows, 1), np.nan))
    return np.concatenate(parts, axis=1)[:, :width]


def _head(data: dict[str, Any], lost: str, width: int) -> list[Text]:
    mark, colour = ("✕", "red") if lost else STATES.get(data["state"], ("✕", "red"))
    state = "connection lost" if lost else {"warming": "warming up"}.get(data["state"], data["state"])
    mesh, policies = data["mesh"], data["policies"]
    facts = (
        f"{mesh['dp']} x {mesh['tp']} = {mesh['ranks']} ranks",
        *(f"{name} {policies[name]}" for name in ("dispatch", "queue", "placement")),
        f"up {span(data['uptime_s'])}",
    )
    return flowed(
        [
            Text.assemble(("gimbal ", "bold"), data["model"]),
            Text(f"{mark} {state}", f"bold {colour}"),
            *(Text(fact, "dim") for fact in facts),
        ],
        width,
    )


def _warnings(data: dict[str, Any], lost: str) -> list[Text]:
    if lost:
        return [Text(f"! {lost}; the data below are old", "bold red", no_wrap=True, overflow="ellipsis")]
    if not data["warnings"] and data["state"] == "serving":
        return [Text("✓ all well", "green")]
    return [Text(f"! {words}", "bold yellow", no_wrap=True, overflow="ellipsis") for words in data["warnings"]]


def _series(data: dict[str, Any], width: int) -> Table:
    history, latency = data["history"], data["latency"]
    table = Table.grid(padding=(0, 2))
    for _ in range(4):
        table.add_column(no_wrap=True)
    line = max(10, min(60, width - 50))
    for name in ("generated", "prompt"):
        words = {"generated": "output", "prompt": "prompts"}[name]
        table.add_row(words, f"{data['rates'][name]:,.0f} tokens/s", "", sparkline(history[name], line))
    for name, words in (("ttft", "first token"), ("tpot", "per token"), ("e2e", "request")):
        middle, high = seconds(latency[name]["p50"]), seconds(latency[name]["p99"])
        table.add_row(words, f"p50 {middle}", f"p99 {high}", sparkline(history[f"{name}_p50"], line))
    return table


def _engines(data: dict[str, Any], width: int, color: bool) -> RenderableType:
    engines = data["engines"]
    full = max(data["token_budget"], *(engine["score"] for engine in engines))
    bar_width = max(10, width - 68)
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for name in ("engine", "running", "waiting", "next waits", "KV", "trace", "score"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(f"of {full:,.0f} tokens", no_wrap=True)
    for index, engine in enumerate(engines):
        lengths = stacked([engine["terms"][name] for name in TERMS], full, bar_width)
        bar = Text()
        for (_, colour, letter), length in zip(TERMS.values(), lengths, strict=True):
            bar.append(("█" if color else letter) * length, colour)
        head = engine["queue_head"]
        table.add_row(
            str(index),
            f"{engine['running']:,}",
            f"{engine['waiting']:,}",
            seconds(head["waited_s"]) if head else "-",
            f"{engine['kv_use']:.0%}",
            "none" if engine["trace_age_s"] is None else seconds(engine["trace_age_s"]),
            f"{engine['score']:,.0f}",
            bar,
        )
    return Group(Text(""), table)


def _legend(width: int, color: bool) -> list[Text]:
    """The terms of an engine's score."""
    return flowed(
        [
            Text.assemble(("█ " if color else f"{letter} ", colour), (words, "dim"))
            for words, colour, letter in TERMS.values()
        ],
        width,
    )


def _traffic_title(data: dict[str, Any], width: int) -> list[Text]:
    experts = data["experts"]
    parts = (
        f"expert traffic, {experts['scope']}:",
        f"rank imbalance {experts['imbalance']:.2f}x,",
        f"worst {max(experts['imbalance_L']):.2f}x in layer {experts['worst_layer']};",
        f"{experts['remote_share']:.0%} of tokens leave their engine",
    )
    return flowed([Text(part) for part in parts], width, gap=" ")


def _heat_map(data: dict[str, Any], width: int, rows: int, color: bool, title: Sequence[Text]) -> RenderableType:
    experts = data["experts"]
    tokens_LP = np.array(experts["tokens_LP"])
    if not tokens_LP.any():
        return Text("\nno expert traffic counted yet", "dim")
    share_XY = shares(tokens_LP, data["mesh"]["ranks"], rows, width - 6)
    first = [layers[0] for layers in np.array_split(experts["layers"], rows)]
    map_rows = []
    for row in range(0, rows, 2 if color else 1):
        line = Text(f"{first[row]:>4}  ", "dim", no_wrap=True)
        below_Y = share_XY[row + 1] if row + 1 < rows else np.full_like(share_XY[row], np.nan)
        for upper, lower in zip(share_XY[row], below_Y, strict=True):
            line.append_text(_cell(upper, lower) if color else Text(_shade(upper)))
        map_rows.append(line)
    scale = Text("      of an even share: ", "dim", no_wrap=True, overflow="ellipsis")
    for value in 2.0 ** np.arange(-3, 4):
        scale.append_text(_cell(value, value) if color else Text(_shade(value)))
        scale.append(f" {value:g}x  ", "dim")
    return Group(Text(""), *title, *map_rows, scale)


def _cell(upper: float, lower: float) -> Text:
    """Return two cells of the map in one character; NaN is a gap."""
    if math.isnan(upper):
        return Text(" ")
    return Text("▀", Style(color=_colour(upper), bgcolor=None if math.isnan(lower) else _colour(lower)))


def _colour(share: float) -> str:
    place = (len(HEAT) - 1) * (0.5 + max(-3.0, min(3.0, math.log2(max(share, 1e-6)))) / 6)
    red, green, blue = (round(np.interp(place, range(len(HEAT)), channel)) for channel in HEAT.T)
    return f"rgb({red},{green},{blue})"


def _shade(share: float) -> str:
    if math.isnan(share):
        return " "
    return SHADES[round((len(SHADES) - 1) * (0.5 + max(-3.0, min(3.0, math.log2(max(share, 1e-6)))) / 6))]


def _decisions(data: dict[str, Any]) -> list[RenderableType]:
    placement = data["placement"]
    title = f"\nplacement: {placement['experts_moved']:,} experts moved"
    if placement["changed_age_s"] is not None:
        title += f", last change {span(placement['changed_age_s'])} ago"
    lines = [Text(title, no_wrap=True)]
    for one in placement["decisions"][:DECISIONS]:
        times = f" {one['times']:,} times" if one["times"] > 1 else ""
        what, colour = OUTCOMES.get(one["outcome"], (f"- {one['outcome']}{times}", "dim"))
        line = Text(f"{span(one['age_s']) + ' ago':<16}", no_wrap=True, overflow="ellipsis")
        line.append(f"{what:<16}", colour)
        even = f"imbalance {one['imbalance_before']:.2f}x"
        if one["experts_moved"]:
            line.append(f"{one['experts_moved']:,} experts, gain {one['gain']:.1%}  ")
            even += f" → {one['imbalance_after']:.2f}x, remote {one['remote_before']:.0%} → {one['remote_after']:.0%}"
            if one["far_before"]:
                even += f", far {one['far_before']:.0%} → {one['far_after']:.0%}"
        if one["outcome"] in ("kept", "failed"):
            even += f"; {one['reason']}"
        lines.append(line.append(even, "dim"))
    return [*lines]
