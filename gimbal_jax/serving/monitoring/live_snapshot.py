"""Functions from frozen records to the parts of the live view (see ``live_format``)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gimbal_jax.config import ServerConfig
from gimbal_jax.scheduler.dispatch import gimbal_terms
from gimbal_jax.scheduler.dispatch_decision import DispatchRecord, sum_S
from gimbal_jax.scheduler.trace import Trace, idle_trace
from gimbal_jax.scheduler.traffic import imbalance_L, remote_tokens_L
from gimbal_jax.serving.core.status import Status
from gimbal_jax.serving.engine.queue import QueueHead
from gimbal_jax.serving.frontend.record import RequestRecord
from gimbal_jax.serving.monitoring.live_format import (
    TEXT,
    DispatchSummary,
    EngineRow,
    ExpertMap,
    History,
    LatencySummary,
    Percentiles,
    PlacementRow,
    PlacementSummary,
    QueueHeadRow,
    RequestRow,
)
from gimbal_jax.serving.placement.records import PlacementRecord, PlacementStatus

RECENT_S = 60.0
"""Recent decisions, requests and latencies are those of this many seconds."""
BUCKET_S, BUCKETS = 5.0, 60
"""Seconds of one point of the history, and number of points: five minutes."""
DECISIONS = 30
"""Placement decisions shown."""


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """Latency of a request that has ended."""

    end: float
    """Time of its end."""
    outcome: str
    first_token_s: float | None
    token_s: float | None
    total_s: float | None
    """Seconds from arrival to end; None unless its output is complete."""


@dataclass(frozen=True, slots=True)
class TokenSample:
    """Tokens since start, at one time."""

    time: float
    prompt: int
    generated: int


def ended_request(record: RequestRecord) -> EndedRequest:
    """Return what latencies need of a record."""
    complete = record.outcome in ("stop", "length")
    total_s = record.total_s if complete else None
    return EndedRequest(record.arrival + record.total_s, record.outcome, record.first_token_s, record.token_s, total_s)


def request_row(record: RequestRecord, now: float) -> RequestRow:
    """Return a row of the table of ended requests."""
    return {
        "id": record.request_id[:TEXT],
        "client": record.origin.client[:TEXT],
        "age_s": now - (record.arrival + record.total_s),
        "engine": record.engine,
        "rule": record.rule,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "outcome": record.outcome,
        "error": record.error[:TEXT],
        "queue_s": record.queue_s,
        "first_token_s": record.first_token_s,
        "token_s": record.token_s,
        "total_s": record.total_s,
    }


def engine_rows(
    status: Status,
    compensation_S: tuple[int, ...],
    decisions: Sequence[DispatchRecord],
    config: ServerConfig,
    now: float,
) -> list[EngineRow]:
    """Describe every engine: its work, and the terms of its score as dispatch would compute them now.

    Work and terms come from the traces that dispatch sees. Before its first trace an engine is shown idle.
    ``compensation_S``: prefill tokens sent to each engine that its trace does not include.
    """
    traces: Sequence[Trace] = status.traces or [idle_trace(engine) for engine in range(config.mesh.dp)]
    terms = gimbal_terms(traces, compensation_S, config.dispatch, config.engine.token_budget)
    chosen = Counter(record.decision.engine for record in decisions if now - record.time <= RECENT_S)
    return [
        {
            "trace_age_s": now - trace.time if status.traces else None,
            "running": trace.running_requests,
            "waiting": trace.waiting_requests,
            "kv_use": 1 - engine.free_pages / config.engine.num_pages,
            "kv_tokens": trace.kv_tokens,
            "free_pages": engine.free_pages,
            "cached_pages": engine.cached_pages,
            "prefix_hit_rate": engine.prefix_hits / max(1, engine.prefix_queries),
            "waiting_tokens": trace.waiting_tokens,
            "expert_pressure": trace.expert_pressure,
            "terms": {name: values_S[trace.engine] for name, values_S in terms.items()},
            "score": score,
            "queue_head": _queue_head_row(engine.queue_head) if engine.queue_head else None,
            "dispatched": chosen[trace.engine],
        }
        for trace, score, engine in zip(traces, sum_S(terms), status.engines, strict=True)
    ]


def _queue_head_row(head: QueueHead) -> QueueHeadRow:
    return {"id": head.request_id[:TEXT], "waited_s": head.waited_s, "prefill_tokens": head.prefill_tokens}


def summarise_dispatch(rules: dict[str, int], decisions: Sequence[DispatchRecord], now: float) -> DispatchSummary:
    """Count decisions by rule. ``rules`` has those since start, ``decisions`` the last ones."""
    last = decisions[-1] if decisions else None
    return {
        "total": rules,
        "recent": Counter(record.decision.rule for record in decisions if now - record.time <= RECENT_S),
        "last": None
        if last is None
        else {"engine": last.decision.engine, "rule": last.decision.rule, "age_s": now - last.time},
    }


def map_experts(placement: PlacementStatus, moe_layers: tuple[int, ...], ranks: int) -> ExpertMap:
    """Map the last window's traffic by layer and slot; all traffic so far while the first window is open."""
    windowed = bool(placement.window_counts_LSE.any())
    counts_LSE = placement.window_counts_LSE if windowed else placement.total_counts_LSE
    slot_LE = placement.slot_of_expert_LE
    expert_LP = np.argsort(slot_LE, axis=1)
    load_LE = counts_LSE.sum(axis=1)
    total_L = load_LE.sum(axis=1)
    remote_L = remote_tokens_L(counts_LSE, slot_LE, ranks)
    spread_L = imbalance_L(counts_LSE, slot_LE, ranks)
    return {
        "scope": "last window" if windowed else "since start",
        "layers": list(moe_layers),
        "tokens_LP": np.take_along_axis(load_LE, expert_LP, axis=1).tolist(),
        "expert_LP": expert_LP.tolist(),
        "imbalance_L": spread_L.round(4).tolist(),
        "remote_L": (remote_L / np.maximum(total_L, 1)).round(4).tolist(),
        "imbalance": float(spread_L.mean()),
        "worst_layer": moe_layers[int(spread_L.argmax())],
        "remote_share": float(remote_L.sum() / max(int(total_L.sum()), 1)),
    }


def summarise_placement(placement: PlacementStatus, now: float) -> PlacementSummary:
    """Summarise the placement loop. Consecutive decisions that moved nothing become one row."""
    decisions: list[PlacementRow] = []
    for record in reversed(placement.records):
        if decisions and record.outcome == decisions[-1]["outcome"] == "kept":
            decisions[-1]["times"] += 1
        elif len(decisions) < DECISIONS:
            decisions.append(_placement_row(record, now))
    totals = placement.totals
    return {
        "decisions": decisions,
        "imbalance_W": [round(record.imbalance_before, 4) for record in placement.records],
        "experts_moved": totals.experts_moved,
        "bytes_moved": totals.bytes_moved,
        "changed_age_s": None if totals.last_rebalance is None else now - totals.last_rebalance,
        "predicted_gain": totals.predicted_gain,
        "achieved_gain": totals.achieved_gain,
        "failed": totals.failed_decisions + totals.failed_migrations,
    }


def _placement_row(record: PlacementRecord, now: float) -> PlacementRow:
    return {
        "times": 1,
        "age_s": now - record.time,
        "step": record.step,
        "outcome": record.outcome,
        "reason": record.reason[:TEXT],
        "gain": 1 - record.cost_after / record.cost_before if record.cost_before > 0 else 0.0,
        "imbalance_before": record.imbalance_before,
        "imbalance_after": record.imbalance_after,
        "remote_before": record.remote_share_before,
        "remote_after": record.remote_share_after,
        "far_before": record.far_share_before,
        "far_after": record.far_share_after,
        "experts_moved": record.experts_moved,
        "seconds": record.seconds,
    }


def percentiles(values: Iterable[float | None]) -> Percentiles:
    """Return the median and the 99th percentile of the known values, each one of them (nearest rank)."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return {"p50": None, "p99": None}
    p50, p99 = (known[math.ceil(share * len(known)) - 1] for share in (0.5, 0.99))
    return {"p50": p50, "p99": p99}


def summarise_latency(ended: Sequence[EndedRequest], now: float) -> LatencySummary:
    """Summarise the requests that ended in the last ``RECENT_S`` seconds."""
    recent = [one for one in ended if now - one.end <= RECENT_S]
    return {
        "outcomes": Counter(one.outcome for one in recent),
        "ttft": percentiles(one.first_token_s for one in recent),
        "tpot": percentiles(one.token_s for one in recent),
        "e2e": percentiles(one.total_s for one in recent),
    }


def token_rates(samples: Sequence[TokenSample], edges: np.ndarray) -> dict[str, list[float]]:
    """Return tokens per second between neighbouring edges; tokens between two samples are spread evenly."""
    times = [sample.time for sample in samples]
    tokens = {"prompt": [sample.prompt for sample in samples], "generated": [sample.generated for sample in samples]}
    seconds = np.diff(edges)
    return {name: (np.diff(np.interp(edges, times, sums)) / seconds).round(2).tolist() for name, sums in tokens.items()}


def recent_rates(samples: Sequence[TokenSample], now: float) -> dict[str, float]:
    """Return tokens per second over the last ``BUCKET_S`` seconds."""
    return {name: rates[0] for name, rates in token_rates(samples, np.array([now - BUCKET_S, now])).items()}


def bucket_history(ended: Sequence[EndedRequest], samples: Sequence[TokenSample], now: float) -> History:
    """Return rates and latencies of the last whole buckets."""
    last = math.floor(now / BUCKET_S)
    buckets: list[list[EndedRequest]] = [[] for _ in range(BUCKETS)]
    for one in ended:
        place = math.floor(one.end / BUCKET_S) - last + BUCKETS
        if 0 <= place < BUCKETS:
            buckets[place].append(one)
    ttft = [percentiles(one.first_token_s for one in bucket) for bucket in buckets]
    tpot = [percentiles(one.token_s for one in bucket) for bucket in buckets]
    e2e = [percentiles(one.total_s for one in bucket) for bucket in buckets]
    rates = token_rates(samples, (last - BUCKETS + np.arange(BUCKETS + 1)) * BUCKET_S)
    return {
        "bucket_s": BUCKET_S,
        "prompt": rates["prompt"],
        "generated": rates["generated"],
        "ttft_p50": [one["p50"] for one in ttft],
        "ttft_p99": [one["p99"] for one in ttft],
        "tpot_p50": [one["p50"] for one in tpot],
        "tpot_p99": [one["p99"] for one in tpot],
        "e2e_p50": [one["p50"] for one in e2e],
        "e2e_p99": [one["p99"] for one in e2e],
    }


def active_warnings(status: Status, outcomes: dict[str, int], config: ServerConfig, now: float) -> list[str]:
    """Return what an operator should look at, worst first; empty if all is well.

    ``outcomes``: recent requests by outcome.
    """
    found = []
    # The state of the server.
    if status.state == "failed":
        found.append(f"The engine failed: {status.error[:TEXT]}")
    elif status.state == "serving" and not status.traces:
        found.append("No engine has published a trace yet: dispatch goes in turn.")
    # The engines, while they run.
    if status.state in ("serving", "draining"):
        ages = {trace.engine: now - trace.time for trace in status.traces}
        if silent := [f"{s} for {age:.1f} s" for s, age in ages.items() if age > config.dispatch.trace_max_age_s]:
            found.append(f"Engines are silent, and their traces count as missing: {', '.join(silent)}.")
        if full := [f"{t.engine} ({t.kv_use:.0%})" for t in status.traces if t.kv_use > config.dispatch.high_kv]:
            found.append(f"The KV cache is nearly full in engine {', '.join(full)}.")
    # Problems since the start, then those of the last minute.
    records, compiles = status.placement.records, status.steps.compiles_after_warmup
    if records and records[-1].outcome == "failed":
        found.append(f"The last placement decision failed: {records[-1].reason[:TEXT]}")
    if compiles:
        found.append(f"Compiled {compiles} times while serving: requests waited for it.")
    if status.placement.windows_lost:
        found.append(f"{status.placement.windows_lost} traffic windows could not be written.")
    for outcome, words in (("error", "ended with an error"), ("refused", "were rejected")):
        if count := outcomes.get(outcome):
            found.append(f"{count} requests {words} in the last minute.")
    return found
