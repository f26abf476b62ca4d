"""What the live view shows, worked out from frozen records: plain numbers and text that JSON can hold.

Ages are seconds before now. Text that clients or exceptions chose is cut to ``TEXT`` characters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gimbal_jax.config import ServerConfig
from gimbal_jax.scheduler.dispatch import gimbal_terms
from gimbal_jax.scheduler.dispatch_decision import DispatchRecord, sum_S
from gimbal_jax.scheduler.trace import Trace, idle_trace
from gimbal_jax.scheduler.traffic import imbalance_L, remote_tokens_L
from gimbal_jax.serving.core.status import Status
from gimbal_jax.serving.engine.queue import QueueHead
from gimbal_jax.serving.frontend.record import RequestRecord
from gimbal_jax.serving.placement.records import PlacementRecord

TEXT = 200
RECENT_S = 60.0
"""What is said of now, such as latencies, is of this long."""
BUCKET_S, BUCKETS = 5.0, 60
"""History is this many points of so many seconds each: five minutes."""
DECISIONS = 30
"""Placement decisions shown."""


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """What is remembered of a request for its latency."""

    end: float
    outcome: str
    first_token_s: float | None
    token_s: float | None
    total_s: float | None
    """None unless it ran to its own end."""


@dataclass(frozen=True, slots=True)
class TokenSample:
    """Tokens since start, at one time."""

    time: float
    prompt: int
    generated: int


def ended_request(record: RequestRecord) -> EndedRequest:
    """What is remembered of a record."""
    whole = record.outcome in ("stop", "length")
    end = record.arrival + record.total_s
    return EndedRequest(end, record.outcome, record.first_token_s, record.token_s, record.total_s if whole else None)


def request_row(record: RequestRecord) -> dict[str, Any]:
    """A row of the table of recent requests."""
    return {
        "id": record.request_id[:TEXT],
        "client": record.origin.client[:TEXT],
        "end": record.arrival + record.total_s,
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


def engines(
    status: Status,
    compensation_S: tuple[int, ...],
    decisions: Sequence[DispatchRecord],
    config: ServerConfig,
    now: float,
) -> list[dict[str, Any]]:
    """Every engine: what it has to do, and the terms of Gimbal's score, in tokens, as dispatch would add them up now.

    Before its first trace (``trace_age_s`` is None) an engine is shown idle.
    """
    traces: Sequence[Trace] = status.traces or [idle_trace(engine) for engine in range(config.mesh.dp)]
    terms = gimbal_terms(traces, compensation_S, config.dispatch, config.engine.token_budget)
    chosen = Counter(record.decision.engine for record in decisions if now - record.time <= RECENT_S)
    return [
        {
            "trace_age_s": now - trace.time if status.traces else None,
            "running": trace.running_requests,
            "waiting": trace.waiting_requests,
            "kv_use": trace.kv_use,
            "kv_tokens": trace.kv_tokens,
            "free_pages": free_pages,
            "cached_pages": status.cached_pages_S[trace.engine],
            "prefix_hit_rate": status.prefix_hits_S[trace.engine] / max(1, status.prefix_queries_S[trace.engine]),
            "waiting_tokens": trace.waiting_tokens,
            "expert_pressure": trace.expert_pressure,
            "terms": {name: values_S[trace.engine] for name, values_S in terms.items()},
            "score": score,
            "queue_head": head and _queue_head(head),
            "dispatched": chosen[trace.engine],
        }
        for trace, score, free_pages, head in zip(
            traces, sum_S(terms), status.free_pages_S, status.queue_head_S, strict=True
        )
    ]


def _queue_head(head: QueueHead) -> dict[str, Any]:
    return {"id": head.request_id[:TEXT], "waited_s": head.waited_s, "prefill_tokens": head.prefill_tokens}


def dispatch(rules: dict[str, int], decisions: Sequence[DispatchRecord], now: float) -> dict[str, Any]:
    """Decisions by rule, since start and of late, and the last one."""
    last = decisions[-1] if decisions else None
    return {
        "total": rules,
        "recent": Counter(record.decision.rule for record in decisions if now - record.time <= RECENT_S),
        "last": last and {"engine": last.decision.engine, "rule": last.decision.rule, "age_s": now - last.time},
    }


def experts(status: Status, moe_layers: tuple[int, ...], ranks: int) -> dict[str, Any]:
    """Traffic by layer and slot under the placement in force; a rank's slots are neighbours.

    It is the last window's, or all traffic so far while the first one is open.
    """
    windowed = bool(status.window_counts_LSE.any())
    counts_LSE = status.window_counts_LSE if windowed else status.total_counts_LSE
    slots_LE = status.slot_of_expert_LE
    expert_LP = np.argsort(slots_LE, axis=1)
    load_LE = counts_LSE.sum(axis=1)
    total_L = load_LE.sum(axis=1)
    remote_L = remote_tokens_L(counts_LSE, slots_LE, ranks)
    spread_L = imbalance_L(counts_LSE, slots_LE, ranks)
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


def placement(status: Status, now: float) -> dict[str, Any]:
    """The placement loop: its decisions, newest first, the imbalance that each one saw, and what the last change gave.

    Gains are shares of the objective. Decisions in a row that moved nothing are one, ``times`` over.
    """
    decisions: list[dict[str, Any]] = []
    for record in reversed(status.placements):
        if decisions and record.outcome == decisions[-1]["outcome"] == "kept":
            decisions[-1]["times"] += 1
        elif len(decisions) < DECISIONS:
            decisions.append(_decision(record, now))
    totals = status.placement_totals
    return {
        "decisions": decisions,
        "imbalance_W": [round(record.imbalance_before, 4) for record in status.placements],
        "experts_moved": status.experts_moved,
        "bytes_moved": status.bytes_moved,
        "changed_age_s": None if status.last_rebalance is None else now - status.last_rebalance,
        "predicted_gain": totals.predicted_gain,
        "achieved_gain": totals.achieved_gain,
        "failed": totals.failed_decisions + totals.failed_migrations,
    }


def _decision(record: PlacementRecord, now: float) -> dict[str, Any]:
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


def quantiles(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Median and 99th percentile, each one of the values (nearest rank); None without any."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None, None
    middle, high = (known[math.ceil(share * len(known)) - 1] for share in (0.5, 0.99))
    return middle, high


def latency(ended: Sequence[EndedRequest], now: float) -> dict[str, Any]:
    """How requests ended of late, and how long they took."""
    recent = [one for one in ended if now - one.end <= RECENT_S]
    durations = {
        "ttft": quantiles(one.first_token_s for one in recent),
        "tpot": quantiles(one.token_s for one in recent),
        "e2e": quantiles(one.total_s for one in recent),
    }
    return {
        "outcomes": Counter(one.outcome for one in recent),
        **{name: {"p50": middle, "p99": high} for name, (middle, high) in durations.items()},
    }


def token_rates(samples: Sequence[TokenSample], edges: np.ndarray) -> dict[str, list[float]]:
    """Tokens a second between neighbouring edges; what lies between two samples is spread evenly."""
    times = [sample.time for sample in samples]
    tokens = {"prompt": [sample.prompt for sample in samples], "generated": [sample.generated for sample in samples]}
    seconds = np.diff(edges)
    return {name: (np.diff(np.interp(edges, times, sums)) / seconds).round(2).tolist() for name, sums in tokens.items()}


def recent_rates(samples: Sequence[TokenSample], now: float) -> dict[str, float]:
    """Tokens a second over the last bucket's length."""
    return {name: rates[0] for name, rates in token_rates(samples, np.array([now - BUCKET_S, now])).items()}


def history(ended: Sequence[EndedRequest], samples: Sequence[TokenSample], now: float) -> dict[str, Any]:
    """Rates and latencies of the last whole buckets, oldest first; None where nothing ended."""
    last = math.floor(now / BUCKET_S)
    buckets: list[list[EndedRequest]] = [[] for _ in range(BUCKETS)]
    for one in ended:
        place = math.floor(one.end / BUCKET_S) - last + BUCKETS
        if 0 <= place < BUCKETS:
            buckets[place].append(one)
    series: dict[str, list[float | None]] = {}
    for name, field in (("ttft", "first_token_s"), ("tpot", "token_s"), ("e2e", "total_s")):
        pairs = [quantiles(getattr(one, field) for one in bucket) for bucket in buckets]
        series[f"{name}_p50"], series[f"{name}_p99"] = [middle for middle, _ in pairs], [high for _, high in pairs]
    edges = (last - BUCKETS + np.arange(BUCKETS + 1)) * BUCKET_S
    return {"bucket_s": BUCKET_S, **series, **token_rates(samples, edges)}


def warnings(status: Status, outcomes: Counter[str], config: ServerConfig, now: float) -> list[str]:
    """What an operator should look at, worst first; empty while all is well."""
    found = []
    if status.state == "failed":
        found.append(f"The engine failed: {status.error[:TEXT]}")
    elif status.state == "serving" and not status.traces:
        found.append("No engine has published a trace yet: dispatch goes in turn.")
    if status.state in ("serving", "draining"):
        ages = {trace.engine: now - trace.time for trace in status.traces}
        if silent := [f"{s} for {age:.1f} s" for s, age in ages.items() if age > config.dispatch.trace_max_age_s]:
            found.append(f"Engines are silent, and their traces count as missing: {', '.join(silent)}.")
        if full := [f"{t.engine} ({t.kv_use:.0%})" for t in status.traces if t.kv_use > config.dispatch.high_kv]:
            found.append(f"The KV cache is nearly full in engine {', '.join(full)}.")
    if status.placements and (last := status.placements[-1]).outcome == "failed":
        found.append(f"The last placement decision failed: {last.reason[:TEXT]}")
    if status.compiles_after_warmup:
        found.append(f"Compiled {status.compiles_after_warmup} times while serving: requests waited for it.")
    if status.windows_lost:
        found.append(f"{status.windows_lost} traffic windows could not be written.")
    for outcome, words in (("error", "ended with an error"), ("refused", "were refused")):
        if outcomes[outcome]:
            found.append(f"{outcomes[outcome]} requests {words} in the last minute.")
    return found
