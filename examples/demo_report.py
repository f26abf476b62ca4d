"""What a replay did to the experts, as numbers, one table and one picture.

Axes: L MoE layers, S sources (DP engines), E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.table import Table

from gimbal_jax.bench.measurement import Summary, Traffic
from gimbal_jax.scheduler.traffic import imbalance_L, rank_of_expert, remote_share

RANK_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#a463f2", "#97bbf5", "#9c6b4e", "#3ca951")


@dataclass(frozen=True)
class ExpertTraffic:
    """The experts' side of one replay."""

    imbalance: float
    """Fullest rank over mean rank: mean over layers and, weighted by tokens, over time."""
    remote_share: float
    """Share of expert tokens that left their source's ranks."""
    before: Traffic
    """Up to the first change of placement."""
    after: Traffic
    """The last quarter of the traffic, under the last placement."""


@dataclass(frozen=True)
class RunReport:
    """One replay under one set of policies."""

    name: str
    ranks: int
    clients: Summary
    experts: ExpertTraffic
    experts_moved: int
    tokens_counted: float
    """Tokens in the server's expert counts: their sum, divided by layers * k."""
    tokens_served: int
    """Tokens that the requests made the model compute, as their clients know them."""


def expert_traffic(samples: Sequence[Traffic], ranks: int) -> ExpertTraffic:
    """Sum up samples of the counts since start, oldest first.

    The traffic between two samples is taken as served by the earlier one's placement.
    Raises ValueError without traffic between the first sample and the last.
    """
    intervals = [_since(a, b, a.slot_of_expert_LE) for a, b in pairwise(samples)]
    tokens = [int(interval.counts_LSE.sum()) for interval in intervals]
    if not sum(tokens):
        raise ValueError(f"samples: no traffic in {len(samples)} of them")
    uneven = [imbalance_L(i.counts_LSE, i.slot_of_expert_LE, ranks).mean() for i in intervals]
    remote = [remote_share(i.counts_LSE, i.slot_of_expert_LE, ranks) for i in intervals]

    first, last = samples[0], samples[-1]
    changed = (i for i, s in enumerate(samples) if not np.array_equal(s.slot_of_expert_LE, first.slot_of_expert_LE))
    last_unchanged = max(next(changed, len(samples)) - 1, 1)
    quarter = next(s for s in reversed(samples) if 4 * (last.counts_LSE - s.counts_LSE).sum() >= sum(tokens))
    return ExpertTraffic(
        imbalance=float(np.average(uneven, weights=tokens)),
        remote_share=float(np.average(remote, weights=tokens)),
        before=_since(first, samples[last_unchanged], first.slot_of_expert_LE),
        after=_since(quarter, last, last.slot_of_expert_LE),
    )


def _since(a: Traffic, b: Traffic, slot_of_expert_LE: np.ndarray) -> Traffic:
    return Traffic(b.counts_LSE - a.counts_LSE, slot_of_expert_LE)


def comparison_table(runs: Sequence[RunReport]) -> Table:
    """One column per run, one row per measure."""
    measures: dict[str, Callable[[RunReport], str]] = {
        "TTFT mean / p99 (ms)": lambda run: _ms(run.clients.ttft_mean_s, run.clients.ttft_p99_s),
        "TPOT mean / p99 (ms)": lambda run: _ms(run.clients.tpot_mean_s, run.clients.tpot_p99_s),
        "E2E mean / p99 (ms)": lambda run: _ms(run.clients.e2e_mean_s, run.clients.e2e_p99_s),
        "output / all tokens per s": lambda run: (
            f"{run.clients.output_tokens_per_s:.1f} / {run.clients.tokens_per_s:.1f}"
        ),
        "requests failed / all": lambda run: f"{run.clients.failed} / {run.clients.requests}",
        "rank imbalance (fullest / mean)": lambda run: f"{run.experts.imbalance:.3f}",
        "remote share of expert tokens": lambda run: f"{run.experts.remote_share:.1%}",
        "experts moved": lambda run: f"{run.experts_moved:,}",
        "tokens counted / served": lambda run: f"{run.tokens_counted:,.12g} / {run.tokens_served:,}",
    }
    table = Table("", title="The same requests under each set of policies")
    for run in runs:
        table.add_column(run.name, justify="right")
    for label, show in measures.items():
        table.add_row(label, *(show(run) for run in runs))
    return table


def _ms(mean_s: float, p99_s: float) -> str:
    return f"{mean_s * 1e3:,.0f} / {p99_s * 1e3:,.0f}"


def draw(runs: Sequence[RunReport], path: Path) -> None:
    """Write a picture of the expert load of each rank: a row per run, before on the left, after on the right.

    It shows one layer, the least even one of the first run before any expert moved.
    A segment is an expert, coloured by the rank that held it at first.
    """
    before = runs[0].experts.before
    layer = int(imbalance_L(before.counts_LSE, before.slot_of_expert_LE, runs[0].ranks).argmax())
    figure = Figure(figsize=(10, 0.9 + 3.4 * len(runs)), layout="constrained")
    axes_row_column = figure.subplots(len(runs), 2, sharex=True, sharey=True, squeeze=False)
    for run, row in zip(runs, axes_row_column, strict=True):
        home_E = rank_of_expert(run.experts.before.slot_of_expert_LE[layer], run.ranks)
        _draw_ranks(row[0], run.experts.before, run.ranks, layer, home_E)
        _draw_ranks(row[1], run.experts.after, run.ranks, layer, home_E)
        row[0].set_title(f"{run.name}: before the first move\n{row[0].get_title()}", fontsize=10)
        row[1].set_title(f"{run.name}: last quarter of the traffic\n{row[1].get_title()}", fontsize=10)
        row[0].set_ylabel("expert tokens, mean rank = 1")
    for axes in axes_row_column[-1]:
        axes.set_xlabel("rank that holds the expert")
    colours = [Patch(color=_colour(rank), label=str(rank)) for rank in range(runs[0].ranks)]
    figure.legend(handles=colours, title="expert's first rank", loc="outside right center", frameon=False)
    figure.suptitle(f"Load of each rank by expert, MoE layer {layer}", fontsize=12)
    figure.savefig(path, dpi=150)


def _draw_ranks(axes: Axes, traffic: Traffic, ranks: int, layer: int, home_E: np.ndarray) -> None:
    """Stack the experts of each rank, the busiest at the bottom, on their first ranks' colours."""
    load_E = traffic.counts_LSE[layer].sum(axis=0)
    height_E = load_E * ranks / max(int(load_E.sum()), 1)
    rank_E = rank_of_expert(traffic.slot_of_expert_LE[layer], ranks)
    for rank in range(ranks):
        experts = np.flatnonzero(rank_E == rank)
        experts = experts[np.argsort(-height_E[experts], kind="stable")]
        bottoms = np.concatenate([[0.0], np.cumsum(height_E[experts])[:-1]])
        colours = [_colour(home_E[expert]) for expert in experts]
        axes.bar(rank, height_E[experts], 0.75, bottoms, color=colours, edgecolor="white", linewidth=0.6)
    axes.axhline(1.0, color="#444444", linewidth=1, linestyle="--")
    axes.set_xticks(range(ranks))
    axes.spines[["top", "right"]].set_visible(False)
    imbalances_L = imbalance_L(traffic.counts_LSE, traffic.slot_of_expert_LE, ranks)
    axes.set_title(f"fullest rank {imbalances_L[layer]:.2f} x mean (all layers: {imbalances_L.mean():.2f})")


def _colour(rank: int) -> str:
    return RANK_COLOURS[rank % len(RANK_COLOURS)]
