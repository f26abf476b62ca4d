"""Load of a run's experts and share of remote traffic under the contiguous placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.scheduler.traffic import imbalance_L, remote_share, tokens_LSR


@dataclass(frozen=True, eq=False)
class TrafficShape:
    """Numbers of figure 4."""

    relative_LE: np.ndarray
    """Tokens of each expert over its layer's mean."""
    remote_LS: np.ndarray
    """Share of each source's expert tokens that leaves its own ranks, by layer."""
    imbalance_L: np.ndarray
    """Load of the fullest rank over the mean, by layer."""
    remote_share: float
    """Share of remote expert tokens over all layers and sources."""


def traffic_shape(counted: Mapping[str, Any]) -> TrafficShape:
    """Return the traffic shape of a result of ``tasks.ExpertCounts``."""
    counts_LSE, ranks = np.array(counted["counts_LSE"]), counted["ranks"]
    layers, sources, experts = counts_LSE.shape
    slot_of_expert_LE = static_placement(layers, experts, ranks)
    load_LE = counts_LSE.sum(axis=1)
    sent_LSR = tokens_LSR(counts_LSE, slot_of_expert_LE, ranks)
    own_LS = sent_LSR.reshape(layers, sources, sources, -1).sum(axis=3).diagonal(axis1=1, axis2=2)
    return TrafficShape(
        relative_LE=load_LE / load_LE.mean(axis=1, keepdims=True),
        remote_LS=1 - own_LS / sent_LSR.sum(axis=2),
        imbalance_L=imbalance_L(counts_LSE, slot_of_expert_LE, ranks),
        remote_share=remote_share(counts_LSE, slot_of_expert_LE, ranks),
    )
