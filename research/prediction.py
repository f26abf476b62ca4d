"""Errors of predicted kernel times against measured times that were not used for the prediction.

In tables, each inner point is predicted from its two neighbours. Expert products are predicted for three kinds of rows:
the balanced rows of the fit, the balanced rows of ep 1 outside it, and the power-law rows, which no fit uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from gimbal_jax.model.hf_config import PRESETS
from gimbal_jax.simulation.costs import h100_kernels
from gimbal_jax.simulation.expert_kernel import (
    ALL_ACTIVE,
    CHOICES,
    EXPERT_PARALLEL,
    EXPERTS,
    OP,
    STACK,
    ExpertKernel,
    balanced_active,
    fit_expert_kernel,
)
from gimbal_jax.simulation.kernel_table import Curve, Grid, Kernel, measured_kernels
from gimbal_jax.simulation.shapes import MEASURED, TP, shares

DRAWS = 20
"""Draws of an uneven load that are averaged. The collector timed five other draws, so a part of the error is chance."""


def prediction_errors() -> dict[str, np.ndarray]:
    """Return relative errors, predicted / measured - 1, by kernel or kind of rows."""
    kernels = h100_kernels(shares(PRESETS[MEASURED], TP), TP)
    errors = {f"{name}: left out": leave_one_out(times) for name, times in kernels.items()}
    return errors | expert_errors(fit_expert_kernel(), np.random.default_rng(0))


def leave_one_out(times: Curve | Grid) -> np.ndarray:
    """Return the errors at all inner points of a curve, or of all lines of a grid."""
    lines = times.lines() if isinstance(times, Grid) else [times]
    return np.concatenate([line.leave_one_out() for line in lines if len(line.size) > 2])


def expert_errors(kernel: ExpertKernel, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return the errors of the expert products by kind of rows."""
    errors: dict[str, list[float]] = {}
    for row in measured_kernels():
        if (row.op, row.stack) == (OP, STACK):
            ep, tokens = int(row.params["ep"]), int(row.params["global_tokens"])
            loads = list(_loads(row.params, rng))
            seconds = kernel.seconds(np.array(loads), np.full(len(loads), tokens)).mean()
            errors.setdefault(_kind(row, ep, tokens), []).append(seconds / row.seconds - 1)
    return {kind: np.array(values) for kind, values in sorted(errors.items())}


def _kind(row: Kernel, ep: int, tokens: int) -> str:
    if row.params["dist"] != "balanced":
        size = "at least" if tokens >= ALL_ACTIVE else "below"
        return f"experts, power law, {size} {ALL_ACTIVE} tokens: never seen"
    return f"experts, balanced: {'fitted' if ep in EXPERT_PARALLEL else 'ep 1, not fitted'}"


def _loads(params: Mapping[str, str], rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield the pairs of each expert of the timed rank: one load if balanced, else ``DRAWS`` uneven ones."""
    ep, tokens, dist = int(params["ep"]), int(params["global_tokens"]), params["dist"]
    if dist == "balanced":
        active = balanced_active(tokens, ep)
        load_P = np.zeros(EXPERTS // ep, np.int64)
        load_P[:active] = max(1, round(tokens / ALL_ACTIVE))
        yield load_P
    else:
        for _ in range(DRAWS):
            load_RP = uneven_load_E(tokens, float(dist.removeprefix("power_law_")), ep, rng).reshape(ep, -1)
            yield load_RP[load_RP.sum(axis=1).argmax()]


def uneven_load_E(tokens: int, exponent: float, ep: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the pairs of each expert as aiconfigurator's collector does (``power_law_logits_v3``; the code is ours).

    Shares follow a power law, from 1 to 0.8 ``tokens`` (few pairs: 0.01 to 2). No expert gets more than ``tokens``.
    Pairs that rounding and this limit leave over go to the least loaded expert of one rank after the other. Excess
    pairs are taken from the most loaded expert.
    """
    pairs = tokens * CHOICES
    low, high = (1.0, 0.8 * tokens) if pairs > EXPERTS else (0.01, 2.0)
    ends = np.array([low, high]) ** (1 - exponent)
    share_E = (ends[0] + (ends[1] - ends[0]) * rng.random(EXPERTS)) ** (1 / (1 - exponent))
    load_RP = np.minimum(np.rint(share_E / share_E.sum() * pairs), tokens).astype(np.int64).reshape(ep, -1)
    rank = 0
    while missing := int(pairs - load_RP.sum()):
        row_P = load_RP[rank % ep]
        if missing > 0 and row_P.min() < tokens:
            row_P[row_P.argmin()] += 1
        elif missing < 0 and row_P.max() > 0:
            row_P[row_P.argmax()] -= 1
        rank += 1
    return load_RP.reshape(-1)
