"""What clients saw of their requests, and its summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Measurement:
    """What one client saw. Times run from when the request was due, so a late send counts as waiting."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    ttft_s: float
    """Time to the first token; NaN if none came."""
    e2e_s: float
    """Time to the end of the stream."""
    error: str = ""

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; NaN for fewer than two tokens."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else float("nan")


@dataclass(frozen=True)
class Summary:
    """A replay in numbers; means and 99th percentiles are over the requests that succeeded."""

    requests: int
    failed: int
    ttft_mean_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p99_s: float
    e2e_mean_s: float
    e2e_p99_s: float
    seconds: float
    """From the start of the replay to the end of its last stream."""
    output_tokens_per_s: float
    tokens_per_s: float
    """Prompt and output."""


def summarise(measurements: Sequence[Measurement]) -> Summary:
    """Means and 99th percentiles (linear interpolation); NaN where nothing was measured."""
    good = [m for m in measurements if not m.error]
    seconds = max((m.arrival_s + m.e2e_s for m in measurements), default=float("nan"))
    ttft_mean, ttft_p99 = _mean_p99([m.ttft_s for m in good])
    tpot_mean, tpot_p99 = _mean_p99([m.tpot_s for m in good])
    e2e_mean, e2e_p99 = _mean_p99([m.e2e_s for m in good])
    output_tokens = sum(m.output_tokens for m in good)
    return Summary(
        requests=len(measurements),
        failed=len(measurements) - len(good),
        ttft_mean_s=ttft_mean,
        ttft_p99_s=ttft_p99,
        tpot_mean_s=tpot_mean,
        tpot_p99_s=tpot_p99,
        e2e_mean_s=e2e_mean,
        e2e_p99_s=e2e_p99,
        seconds=seconds,
        output_tokens_per_s=output_tokens / seconds,
        tokens_per_s=(output_tokens + sum(m.input_tokens for m in good)) / seconds,
    )


def _mean_p99(values: Sequence[float]) -> tuple[float, float]:
    known = [value for value in values if not np.isnan(value)]
    if not known:
        return float("nan"), float("nan")
    return float(np.mean(known)), float(np.percentile(known, 99))
