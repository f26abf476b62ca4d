"""What one rank's expert products cost, as a sum of three parts fitted to measured layers.

    seconds = launch(active experts) + sum over active experts of product(its pairs) + handling(tokens)

``launch`` is the layer with one pair for each active expert: their weights are read. ``product`` is what more pairs
of an expert add. ``handling`` is what grows with the tokens that the rank is given, however few of them choose its
experts: vLLM's layer sorts, activates and adds up places for all choices of all of them.

The parts come from the balanced rows, in which the same tokens meet 64, 32 and 16 experts on a rank (ep 2, 4, 8):
a line through the three gives the cost of an expert and the cost without any. ep 1, without a map of experts to
ranks, and the power-law rows, which time the fullest rank of an uneven draw, only check it: ``research.cost_report``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gimbal_jax.simulation.kernel_table import Curve, curve

OP, STACK = "moe_fused", "vllm-0.24.0"
EXPERTS, CHOICES = 128, 8
"""Of the measured layer."""
EXPERT_PARALLEL = (2, 4, 8)
ALL_ACTIVE = EXPERTS // CHOICES
"""Tokens from which on the balanced rows use every expert; each of them has tokens / ALL_ACTIVE pairs."""
TABLED_PAIRS = 1 << 15


@dataclass(frozen=True, eq=False)
class ExpertKernel:
    """The three parts; see above."""

    launch: Curve
    """By active experts."""
    product: Curve
    """By pairs of one expert; 0 for none and for the first."""
    handling: Curve
    """By tokens; 0 for the first ``ALL_ACTIVE``."""
    product_table: np.ndarray
    """``product`` for every whole number of pairs: looking up is faster than interpolating."""

    def scaled(self, weights: float, token: float) -> ExpertKernel:
        """The same for experts of ``weights`` times as many weights, and tokens of ``token`` times as many bytes.

        The least time of a launch stays; reading weights and multiplying by them take ``weights`` times as long.
        """
        reading = self.launch.seconds - self.launch.at(np.array(0.0))
        return ExpertKernel(
            Curve(self.launch.size, self.launch.seconds + (weights - 1) * reading),
            Curve(self.product.size, weights * self.product.seconds),
            Curve(self.handling.size, token * self.handling.seconds),
            weights * self.product_table,
        )

    def products(self, pairs_P: np.ndarray) -> np.ndarray:
        """Time that the pairs of each expert add, any shape; int64."""
        seconds = self.product_table[np.minimum(pairs_P, TABLED_PAIRS)]
        if pairs_P.max(initial=0) > TABLED_PAIRS:
            return np.where(pairs_P > TABLED_PAIRS, self.product.at(pairs_P), seconds)
        return seconds

    def seconds(self, pairs_RP: np.ndarray, tokens_R: np.ndarray) -> np.ndarray:
        """Time of each rank, given the pairs of its experts [..., R, P] and the tokens that it gets [..., R]."""
        # einsum is several times as fast as sum() over a short last axis.
        active_R = np.einsum("...p->...", (pairs_RP > 0).astype(np.int64))
        products_R = np.einsum("...p->...", self.products(pairs_RP))
        parts = self.launch.at(active_R) + products_R + self.handling.at(tokens_R)
        return np.where(active_R > 0, parts, 0.0)

    def outside(self, pairs_RP: np.ndarray, tokens_R: np.ndarray) -> int:
        """How many of these ranks have an expert, or tokens, beyond what was measured."""
        beyond_R = tokens_R > self.handling.size[-1]
        if pairs_RP.max(initial=0) > self.product.size[-1]:
            beyond_R = beyond_R | (pairs_RP > self.product.size[-1]).any(axis=-1)
        return int(np.count_nonzero(beyond_R))


def balanced_active(tokens: float, ep: int) -> int:
    """Active experts of one rank in a balanced row: its even share, as the collector spreads them."""
    return max(1, round(min(tokens, ALL_ACTIVE) * CHOICES / ep))


def fit_expert_kernel() -> ExpertKernel:
    """The parts from the table."""
    rows = {ep: curve(OP, STACK, "global_tokens", dist="balanced", ep=ep) for ep in EXPERT_PARALLEL}
    tokens = rows[2].size
    seconds_NP = np.stack([rows[ep].seconds for ep in EXPERT_PARALLEL], axis=1)
    full = tokens >= ALL_ACTIVE
    without, each = np.array([_line(EXPERTS / np.array(EXPERT_PARALLEL), seconds) for seconds in seconds_NP[full]]).T

    launch = Curve.through(
        (balanced_active(n, ep), seconds)
        for ep, row in rows.items()
        for n, seconds in zip(row.size, row.seconds, strict=True)
        if n <= ALL_ACTIVE
    )
    # More pairs never cost less: what the noise of the lines says otherwise is levelled.
    product = Curve(tokens[full] / ALL_ACTIVE, np.maximum.accumulate(each) - each[0])
    handling = Curve(tokens[full], np.maximum.accumulate(without) - without[0])
    return ExpertKernel(launch, product, handling, product.at(np.arange(TABLED_PAIRS + 1)))


def _line(active: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """(time without experts, time of each), with the least relative errors."""
    terms = np.stack([np.ones_like(active), active], axis=1) / seconds[:, None]
    return np.linalg.lstsq(terms, np.ones(len(seconds)))[0]
