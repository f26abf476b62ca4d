"""Results of the demo for requests and experts, as numbers, one table and one picture.

Axes: L MoE layers, S sources (DP engines), E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.table import Table

from gimbal_jax.bench.measurement import Summary, Traffic
from gimbal_jax.scheduler.traffic import imbalance_L, rank_of_expert, remote_share

RANK_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#a463f2", "#97bbf5", "#9c6b4e", "#3ca951")

# Label -> value of one round. These are rows of the table and panels of the picture.
LATENCIES: dict[str, Callable[[Summary], float]] = {
    "TTFT mean (ms)": lambda clients: clients.ttft_mean_s * 1e3,
    "TPOT mean (ms)": lambda clients: clients.tpot_mean_s * 1e3,
    "E2E mean (ms)": lambda clients: clients.e2e_mean_s * 1e3,
}
ROUND_MEASURES = {
    **LATENCIES,
    "E2E p99 (ms)": lambda clients: clients.e2e_p99_s * 1e3,
    "output tokens per s": lambda clients: clients.output_tokens_per_s,
    "all tokens per s": lambda clients: clients.tokens_per_s,
}


@dataclass(frozen=True)
class ExpertTraffic:
    """Load of the ranks over all rounds of one server.

    Shares and imbalances are means over layers and, weighted by tokens, over the intervals between samples.
    """

    imbalance: float
    """Load of the fullest rank over the mean rank load, over all traffic."""
    imbalance_at_end: float
    """Imbalance over the last quarter of the traffic, after placement decisions on the earlier three."""
    remote_share: float
    """Share of expert tokens that left the ranks of their source, over all traffic."""
    remote_share_at_end: float
    """Remote share over the last quarter of the traffic."""
    before: Traffic
    """Traffic until the first change of placement."""
    after: Traffic
    """Last quarter of the traffic, shown under the last placement."""


@dataclass(frozen=True)
class RunReport:
    """Results of all rounds with one set of policies."""

    name: str
    ranks: int
    rounds: tuple[Summary, ...]
    """Latency and throughput of each round, as measured by the clients."""
    experts: ExpertTraffic
    experts_moved: int
    preemptions: int
    """Number of times that a sequence lost its pages to another one and was computed again."""
    tokens_counted: float
    """Tokens in the server's expert counts: their sum, divided by layers * k."""
    tokens_served: int
    """Tokens that the model had to compute for the requests, as counted by the clients."""


def expert_traffic(samples: Sequence[Traffic], ranks: int) -> ExpertTraffic:
    """Summarise samples of the counts since the start, oldest first.

    The traffic between two samples is attributed to the placement of the earlier one. Raises ValueError if there is no
    traffic between the first and the last sample.
    """
    first, last = samples[0], samples[-1]
    total = (last.counts_LSE - first.counts_LSE).sum()
    if not total:
        raise ValueError(
            f"samples: {len(samples)} samples have no traffic. Send requests between the first and the last"
        )
    changed = (i for i, s in enumerate(samples) if not np.array_equal(s.slot_of_expert_LE, first.slot_of_expert_LE))
    last_unchanged = max(next(changed, len(samples)) - 1, 1)
    quarter = next(
        i for i in reversed(range(len(samples) - 1)) if 4 * (last.counts_LSE - samples[i].counts_LSE).sum() >= total
    )
    imbalance, remote = _means(samples, ranks)
    imbalance_at_end, remote_at_end = _means(samples[quarter:], ranks)
    return ExpertTraffic(
        imbalance=imbalance,
        imbalance_at_end=imbalance_at_end,
        remote_share=remote,
        remote_share_at_end=remote_at_end,
        before=_since(first, samples[last_unchanged], first.slot_of_expert_LE),
        after=_since(samples[quarter], last, last.slot_of_expert_LE),
    )


def _means(samples: Sequence[Traffic], ranks: int) -> tuple[float, float]:
    """Return the imbalance and the remote share between the samples, weighted by tokens."""
    intervals = [_since(a, b, a.slot_of_expert_LE) for a, b in pairwise(samples)]
    tokens = [int(interval.counts_LSE.sum()) for interval in intervals]
    uneven = [imbalance_L(i.counts_LSE, i.slot_of_expert_LE, ranks).mean() for i in intervals]
    remote = [remote_share(i.counts_LSE, i.slot_of_expert_LE, ranks) for i in intervals]
    return float(np.average(uneven, weights=tokens)), float(np.average(remote, weights=tokens))


def _since(a: Traffic, b: Traffic, slot_of_expert_LE: np.ndarray) -> Traffic:
    return Traffic(b.counts_LSE - a.counts_LSE, slot_of_expert_LE)


def comparison_table(runs: Sequence[RunReport]) -> Table:
    """Return a table of one column per run and one row per measure.

    The rows that hardly depend on other load of the host are first.
    """
    experts: dict[str, Callable[[RunReport], str]] = {
        "rank imbalance at the end": lambda run: f"{run.experts.imbalance_at_end:.3f}",
        "remote share at the end": lambda run: f"{run.experts.remote_share_at_end:.1%}",
        "experts moved": lambda run: f"{run.experts_moved:,}",
        "tokens counted / served": lambda run: f"{run.tokens_counted:,.12g} / {run.tokens_served:,}",
    }
    table = Table(title=f"The same {len(runs[0].rounds)} rounds under each set of policies")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    for label, show in experts.items():
        table.add_row(label, *(show(run) for run in runs))
    table.add_section()
    table.add_row("medians (min to max)", *("" for _ in runs), style="dim")
    for label, measure in ROUND_MEASURES.items():
        table.add_row(label, *(_median_and_range([measure(clients) for clients in run.rounds]) for run in runs))
    failed = (f"{sum(c.failed for c in run.rounds)} / {sum(c.requests for c in run.rounds)}" for run in runs)
    table.add_row("requests failed / all", *failed)
    return table


def _median_and_range(values: Sequence[float]) -> str:
    digits = 0 if median(values) >= 100 else 1
    return f"{median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def notes(runs: Sequence[RunReport]) -> list[str]:
    """Return sentences that explain how to read the table."""
    found = [
        "At the end: over the last quarter of the traffic. The first rows hardly depend on other load of the host. "
        "Usually eplb's ranks are slightly more even, while gimbal moves several times fewer experts.",
        "Latency and throughput depend on the load of the host. A difference within the range of the rounds is noise. "
        "Expect no difference on CPU devices (docs/results.md).",
    ]
    if any(run.tokens_counted != run.tokens_served for run in runs):
        preempted = ", ".join(f"{run.name}: {run.preemptions}" for run in runs)
        found.append(
            "Tokens counted exceed tokens served if sequences were preempted and computed again, or requests failed. "
            f"Preemptions: {preempted}."
        )
    return found


def draw(runs: Sequence[RunReport], path: Path) -> None:
    """Write a picture: the expert load of each rank, and below it the latencies of the rounds.

    Each run has a row, with the ranks before the first move on the left and the last quarter of the traffic on the
    right. The picture shows one MoE layer, the one with the largest imbalance in the first run before any expert moved.
    A segment is an expert, with the colour of the rank that held it at first.
    """
    before = runs[0].experts.before
    layer = int(imbalance_L(before.counts_LSE, before.slot_of_expert_LE, runs[0].ranks).argmax())
    figure = Figure(figsize=(10, 3.5 + 3.4 * len(runs)), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(3.4 * len(runs), 2.6))
    ranks_part, rounds_part = parts
    axes_row_column = ranks_part.subplots(len(runs), 2, sharex=True, sharey=True, squeeze=False)
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
    ranks_part.legend(handles=colours, title="expert's first rank", loc="outside right center", frameon=False)
    ranks_part.suptitle(f"Load of each rank by expert, MoE layer {layer}", fontsize=12)
    _draw_rounds(rounds_part.subplots(1, len(LATENCIES)), runs)
    rounds_part.suptitle("Latency of each round", fontsize=12)
    figure.savefig(path, dpi=150)


def _draw_rounds(axes_row: Sequence[Axes], runs: Sequence[RunReport]) -> None:
    """Draw one panel per latency, with a line per run and its median dashed."""
    for axes, (label, measure) in zip(axes_row, LATENCIES.items(), strict=True):
        for run, colour in zip(runs, ("#777777", "#d1495b", *RANK_COLOURS), strict=False):
            values = [measure(clients) for clients in run.rounds]
            axes.plot(range(1, len(values) + 1), values, "o-", color=colour, label=run.name)
            axes.axhline(median(values), color=colour, linewidth=1, linestyle="--")
        axes.set_ylim(bottom=0)
        axes.set_xticks(range(1, len(runs[0].rounds) + 1))
        axes.set_xlabel("round")
        axes.set_title(label, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    axes_row[0].legend(fontsize=8, frameon=False)


def _draw_ranks(axes: Axes, traffic: Traffic, ranks: int, layer: int, home_E: np.ndarray) -> None:
    """Draw the experts of each rank as a stack, the busiest at the bottom, in the colours of their first ranks."""
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
    axes.set_title(f"fullest rank {imbalances_L[layer]:.2f} x mean")


def _colour(rank: int) -> str:
    return RANK_COLOURS[rank % len(RANK_COLOURS)]
