"""Observations of clients about their requests, and their summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Measurement:
    """Observations of one client. Times run from when the request was due, so a late send counts as waiting."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    ttft_s: float
    """Seconds to the first token; NaN if there was none."""
    e2e_s: float
    """Seconds to the end of the stream."""
    error: str = ""
    gaps_s: tuple[float, ...] = ()
    """Seconds between messages with tokens."""
    cached_tokens: int = 0
    """Prompt tokens that were in the server's prefix cache."""

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first; NaN for fewer than two tokens."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else float("nan")


@dataclass(frozen=True)
class Summary:
    """Summary of a replay. Means and percentiles are over the requests that succeeded."""

    requests: int
    failed: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    itl_mean_s: float
    """Inter-token latency over all gaps between messages of all requests, as in vLLM."""
    itl_p50_s: float
    itl_p99_s: float
    e2e_mean_s: float
    e2e_p50_s: float
    e2e_p99_s: float
    seconds: float
    """Seconds from the start of the replay to the end of its last stream."""
    requests_per_s: float
    output_tokens_per_s: float
    tokens_per_s: float
    """Prompt and output tokens per second."""
    input_tokens: int
    output_tokens: int
    cached_tokens: int


def summarise(measurements: Sequence[Measurement]) -> Summary:
    """Return means and percentiles (linear interpolation), with NaN if nothing was measured."""
    good = [m for m in measurements if not m.error]
    seconds = max((m.arrival_s + m.e2e_s for m in measurements), default=float("nan"))
    ttft_mean, ttft_p50, ttft_p99 = _mean_p50_p99([m.ttft_s for m in good])
    tpot_mean, tpot_p50, tpot_p99 = _mean_p50_p99([m.tpot_s for m in good])
    itl_mean, itl_p50, itl_p99 = _mean_p50_p99([gap for m in good for gap in m.gaps_s])
    e2e_mean, e2e_p50, e2e_p99 = _mean_p50_p99([m.e2e_s for m in good])
    input_tokens, output_tokens = sum(m.input_tokens for m in good), sum(m.output_tokens for m in good)
    return Summary(
        requests=len(measurements),
        failed=len(measurements) - len(good),
        ttft_mean_s=ttft_mean,
        ttft_p50_s=ttft_p50,
        ttft_p99_s=ttft_p99,
        tpot_mean_s=tpot_mean,
        tpot_p50_s=tpot_p50,
        tpot_p99_s=tpot_p99,
        itl_mean_s=itl_mean,
        itl_p50_s=itl_p50,
        itl_p99_s=itl_p99,
        e2e_mean_s=e2e_mean,
        e2e_p50_s=e2e_p50,
        e2e_p99_s=e2e_p99,
        seconds=seconds,
        requests_per_s=len(good) / seconds,
        output_tokens_per_s=output_tokens / seconds,
        tokens_per_s=(output_tokens + input_tokens) / seconds,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(m.cached_tokens for m in good),
    )


def _mean_p50_p99(values: Sequence[float]) -> tuple[float, float, float]:
    known = [value for value in values if not np.isnan(value)]
    if not known:
        return float("nan"), float("nan"), float("nan")
    p50, p99 = np.percentile(known, (50, 99))
    return float(np.mean(known)), float(p50), float(p99)


@dataclass(frozen=True)
class Traffic:
    """Counted expert tokens, and the placement that served them."""

    counts_LSE: np.ndarray
    slot_of_expert_LE: np.ndarray
