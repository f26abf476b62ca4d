"""How well the kernel times predict what they were not made of.

Tables: each inner point from its two neighbours. Expert products: the balanced rows that the parts were fitted to, the
rows of ep 1 that they were not, and the power-law rows, which nothing was fitted to.
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
"""Of an uneven load, averaged. The collector timed five draws of its own, so a part of the error is chance."""


def prediction_errors() -> dict[str, np.ndarray]:
    """Relative errors, predicted / measured - 1, by kernel or kind of rows."""
    kernels = h100_kernels(shares(PRESETS[MEASURED], TP), TP)
    errors = {f"{name}: left out": leave_one_out(times) for name, times in kernels.items()}
    return errors | expert_errors(fit_expert_kernel(), np.random.default_rng(0))


def leave_one_out(times: Curve | Grid) -> np.ndarray:
    """Errors at all inner points of a curve, or of all lines of a grid."""
    lines = times.lines() if isinstance(times, Grid) else [times]
    return np.concatenate([line.leave_one_out() for line in lines if len(line.size) > 2])


def expert_errors(kernel: ExpertKernel, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Errors of the expert products by kind of rows."""
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
    """Pairs of each expert of the rank that was timed."""
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
    """Pairs of each expert in the form of aiconfigurator's collector (``power_law_logits_v3``), in our words.

    Shares follow a power law, from 1 to 0.8 ``tokens`` (few pairs: 0.01 to 2); no expert gets more than ``tokens``.
    What rounding and that limit leave goes to the least loaded expert of one rank after the other, or comes from the
    most loaded.
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
