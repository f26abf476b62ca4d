"""Time of one rank's expert products, as a sum of three parts fitted to measured layers.

    seconds = launch(active experts) + sum over active experts of product(its pairs) + handling(tokens)

``launch`` is the time of a layer with one pair for each active expert, which reads the weights of these experts.
``product`` is the time that further pairs of an expert add. ``handling`` grows with all tokens that the rank gets,
because vLLM's layer sorts, activates and adds up places for all choices of all of them.

The parts come from the balanced rows of the table. There the same tokens meet 64, 32 and 16 experts on a rank
(ep 2, 4, 8). A line through these three points gives the time of an expert and the time without any expert. Two kinds
of rows only check the fit, in ``research.cost_report``. ep 1 has no map of experts to ranks. The power-law rows time
the fullest rank of an uneven draw.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gimbal_jax.simulation.kernel_table import Curve, curve

OP, STACK = "moe_fused", "vllm-0.24.0"
EXPERTS, CHOICES = 128, 8
"""Experts and choices per token of the measured layer."""
EXPERT_PARALLEL = (2, 4, 8)
ALL_ACTIVE = EXPERTS // CHOICES
"""Least tokens with which balanced rows use every expert. Each expert then has tokens / ALL_ACTIVE pairs."""
TABLED_PAIRS = 1 << 15
"""Greatest number of pairs in ``product_table``."""


@dataclass(frozen=True, eq=False)
class ExpertKernel:
    """The three parts of the time of a rank's expert products, and the formula that adds them up."""

    launch: Curve
    """Time by active experts."""
    product: Curve
    """Time by pairs of one expert; 0 for no pair and for the first pair."""
    handling: Curve
    """Time by tokens; 0 up to ``ALL_ACTIVE`` tokens."""
    product_table: np.ndarray
    """``product`` for every whole number of pairs up to ``TABLED_PAIRS``: look-up is faster than interpolation."""

    def scaled(self, weights: float, token: float) -> ExpertKernel:
        """Return the kernel for experts of ``weights`` times the weights and tokens of ``token`` times the bytes.

        The least time of a launch stays. Reading weights and multiplying by them take ``weights`` times as long.
        """
        reading = self.launch.seconds - self.launch.at(np.array(0.0))
        return ExpertKernel(
            Curve(self.launch.size, self.launch.seconds + (weights - 1) * reading),
            Curve(self.product.size, weights * self.product.seconds),
            Curve(self.handling.size, token * self.handling.seconds),
            weights * self.product_table,
        )

    def products(self, pairs_P: np.ndarray) -> np.ndarray:
        """Return the seconds that the pairs of each expert add. ``pairs_P`` is int64, of any shape."""
        seconds = self.product_table[np.minimum(pairs_P, TABLED_PAIRS)]
        if pairs_P.max(initial=0) > TABLED_PAIRS:  # rare: interpolate beyond the table
            return np.where(pairs_P > TABLED_PAIRS, self.product.at(pairs_P), seconds)
        return seconds

    def seconds(self, pairs_RP: np.ndarray, tokens_R: np.ndarray) -> np.ndarray:
        """Return the time of each rank for the pairs of its experts [..., R, P] and its tokens [..., R]."""
        # einsum is several times as fast as sum() over a short last axis.
        active_R = np.einsum("...p->...", (pairs_RP > 0).astype(np.int64))
        products_R = np.einsum("...p->...", self.products(pairs_RP))
        parts = self.launch.at(active_R) + products_R + self.handling.at(tokens_R)
        return np.where(active_R > 0, parts, 0.0)

    def outside(self, pairs_RP: np.ndarray, tokens_R: np.ndarray) -> int:
        """Return how many of these ranks have more tokens, or more pairs for an expert, than was measured."""
        beyond_R = tokens_R > self.handling.size[-1]
        if pairs_RP.max(initial=0) > self.product.size[-1]:
            beyond_R = beyond_R | (pairs_RP > self.product.size[-1]).any(axis=-1)
        return int(np.count_nonzero(beyond_R))


def balanced_active(tokens: float, ep: int) -> int:
    """Return the active experts of one rank in a balanced row, which spreads them evenly."""
    return max(1, round(min(tokens, ALL_ACTIVE) * CHOICES / ep))


def fit_expert_kernel() -> ExpertKernel:
    """Return the three parts, fitted to the kernel table."""
    rows = {ep: curve(OP, STACK, "global_tokens", dist="balanced", ep=ep) for ep in EXPERT_PARALLEL}
    tokens = rows[2].size
    seconds_NP = np.stack([rows[ep].seconds for ep in EXPERT_PARALLEL], axis=1)
    # Only rows with every expert active give lines over the number of experts.
    full = tokens >= ALL_ACTIVE
    without, each = np.array([_line(EXPERTS / np.array(EXPERT_PARALLEL), seconds) for seconds in seconds_NP[full]]).T

    # Up to ALL_ACTIVE tokens no expert has more than one pair, so the rows time the launch alone.
    launch = Curve.through(
        (balanced_active(n, ep), seconds)
        for ep, row in rows.items()
        for n, seconds in zip(row.size, row.seconds, strict=True)
        if n <= ALL_ACTIVE
    )
    # More pairs never cost less, so the running maximum levels the noise of the lines.
    product = Curve(tokens[full] / ALL_ACTIVE, np.maximum.accumulate(each) - each[0])
    handling = Curve(tokens[full], np.maximum.accumulate(without) - without[0])
    return ExpertKernel(launch, product, handling, product.at(np.arange(TABLED_PAIRS + 1)))


def _line(active: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return (time without experts, time of each expert), with the least squares of relative errors."""
    terms = np.stack([np.ones_like(active), active], axis=1) / seconds[:, None]
    return np.linalg.lstsq(terms, np.ones(len(seconds)))[0]
