"""The record of a run, for JSON."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from typing import Any

from gimbal_jax.simulation.simulate import Run


def run_record(run: Run) -> dict[str, Any]:
    """Return the simulated numbers of a run in seconds, tokens and requests. None means not measured.

    The server keeps only its last ``serving.placement.rebalance.RECORDS`` placement decisions, so only these count.
    """
    outcomes = Counter(record.outcome for record in run.placements)
    record = {
        "clients": asdict(run.clients),
        "requests_per_s": (run.clients.requests - run.clients.failed) / run.seconds if run.seconds else math.nan,
        "seconds": run.seconds,
        "steps": run.steps,
        "seconds_by_part": dict(run.parts),
        "live": run.live,
        "running": run.running,
        "kv_use": run.kv_use,
        "prompt_gap_tokens_per_s": run.prompt_gap,
        "imbalance": run.imbalance,
        "remote_share": run.remote_share,
        "far_share": run.far_share,
        "far_bytes": run.far_bytes,
        "far_bytes_per_token": run.far_bytes / max(run.tokens_computed, 1),
        "placement_decisions": len(run.placements),
        "placements_applied": outcomes["applied"],
        "experts_moved": run.experts_moved,
        "bytes_moved": run.bytes_moved,
        "preemptions": run.preemptions,
        "tokens_computed": run.tokens_computed,
        "outside": dict(run.outside),
    }
    return _without_nan(record)


def _without_nan(value: Any) -> Any:
    """Replace NaN by None, because JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
