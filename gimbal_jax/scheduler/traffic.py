"""Statistics of a window's routing counts under a placement. Sums are exact integers.

Axes: L MoE layers, S sources (DP engines), E experts, R ranks, W windows, T the tp ranks of one source.
The ranks of source ``s`` are ``s * tp .. s * tp + tp - 1`` with ``tp = R // S``. Every rank has ``E // R`` slots, so
slot ``p`` is on rank ``p // (E // R)``.
"""

from __future__ import annotations

import numpy as np

from gimbal_jax.config import MeshConfig, PressureForm
from gimbal_jax.scheduler.distance import away_SR


def rank_of_expert(slot_of_expert: np.ndarray, ranks: int) -> np.ndarray:
    """Return the rank that holds each expert, in the shape of ``slot_of_expert``: [E] or [L, E]."""
    return slot_of_expert // (slot_of_expert.shape[-1] // ranks)


def tokens_LSR(counts_LSE: np.ndarray, slot_of_expert_LE: np.ndarray, ranks: int) -> np.ndarray:
    """Return the expert tokens that each source sends to each rank."""
    layers, sources, experts = counts_LSE.shape
    by_slot_LSE = np.empty_like(counts_LSE)
    np.put_along_axis(by_slot_LSE, slot_of_expert_LE[:, None, :], counts_LSE, axis=2)
    return by_slot_LSE.reshape(layers, sources, ranks, experts // ranks).sum(axis=3)


def rank_load_LR(counts_LSE: np.ndarray, slot_of_expert_LE: np.ndarray, ranks: int) -> np.ndarray:
    """Return the expert tokens that each rank processes."""
    return tokens_LSR(counts_LSE.sum(axis=1, keepdims=True), slot_of_expert_LE, ranks)[:, 0]


def imbalance_L(counts_LSE: np.ndarray, slot_of_expert_LE: np.ndarray, ranks: int) -> np.ndarray:
    """Return the load of the fullest rank over the mean rank load, per layer; 1.0 for a layer without traffic."""
    load_LR = rank_load_LR(counts_LSE, slot_of_expert_LE, ranks)
    total_L = load_LR.sum(axis=1)
    return np.where(total_L > 0, load_LR.max(axis=1) * ranks / np.maximum(total_L, 1), 1.0)


def balancedness_vllm(counts_LSE: np.ndarray, slot_of_expert_LE: np.ndarray, ranks: int) -> float:
    """Return vLLM's balancedness; 0.0 without traffic.

    It is the sum over layers of the mean rank load, divided by the sum over layers of the fullest rank's load. So a
    layer's weight is the load of its fullest rank. vLLM's EPLB log applies it to one step
    (vllm/distributed/eplb/eplb_state.py).
    """
    load_LR = rank_load_LR(counts_LSE, slot_of_expert_LE, ranks)
    fullest = load_LR.max(axis=1).sum()
    return float(load_LR.mean(axis=1).sum() / fullest) if fullest > 0 else 0.0


def balancedness_sglang(counts_LSE: np.ndarray, slot_of_expert_LE: np.ndarray, ranks: int) -> float:
    """Return SGLang's balancedness: the mean over layers of (mean rank load + 1e-5) / (fullest rank's load + 1e-5).

    All layers have the same weight, and a layer without traffic counts as balanced. SGLang's expert distribution log
    applies it to one step (sglang/srt/eplb/expert_distribution.py).
    """
    load_LR = rank_load_LR(counts_LSE, slot_of_expert_LE, ranks)
    return float(((load_LR.mean(axis=1) + 1e-5) / (load_LR.max(axis=1) + 1e-5)).mean())


def merge_windows(counts_WLSE: np.ndarray) -> np.ndarray:
    """Return the sum of the windows. Counts are by logical expert, so the windows may have different placements."""
    return counts_WLSE.sum(axis=0)


def smooth_windows(earlier_LSE: np.ndarray, window_LSE: np.ndarray, smoothing: float) -> np.ndarray:
    """Return the window plus ``smoothing`` times the smoothed sum of earlier windows: an exponential decay by window.

    ``smoothing`` 0 returns the window itself, with integer counts.
    """
    return window_LSE + smoothing * earlier_LSE if smoothing else window_LSE


def remote_tokens_L(counts_LSE: np.ndarray, slot_of_expert_LE: np.ndarray, ranks: int) -> np.ndarray:
    """Return the expert tokens that are processed outside their source's own ranks, per layer."""
    layers, sources, _ = counts_LSE.shape
    sent_LSR = tokens_LSR(counts_LSE, slot_of_expert_LE, ranks)
    sent_LSST = sent_LSR.reshape(layers, sources, sources, ranks // sources)
    return sent_LSR.sum(axis=(1, 2)) - np.einsum("lsst->l", sent_LSST)


def remote_share(counts_LSE: np.ndarray, slot_of_expert_LE: np.ndarray, ranks: int) -> float:
    """Return the share of all expert tokens that leave their source's ranks; 0.0 without traffic."""
    total = int(counts_LSE.sum())
    return int(remote_tokens_L(counts_LSE, slot_of_expert_LE, ranks).sum()) / total if total else 0.0


def far_tokens_L(counts_LSE: np.ndarray, slot_of_expert_LE: np.ndarray, mesh: MeshConfig) -> np.ndarray:
    """Return the expert tokens that are processed outside their source's node, per layer.

    If a source has several nodes, its tokens are spread over them as in ``distance.away_SR``.
    """
    return (tokens_LSR(counts_LSE, slot_of_expert_LE, mesh.ranks) * away_SR(mesh)).sum(axis=(1, 2))


def far_share(counts_LSE: np.ndarray, slot_of_expert_LE: np.ndarray, mesh: MeshConfig) -> float:
    """Return the share of all expert tokens that leave their source's node; 0.0 without traffic."""
    total = int(counts_LSE.sum())
    return float(far_tokens_L(counts_LSE, slot_of_expert_LE, mesh).sum()) / total if total else 0.0


def expert_pressure_S(
    counts_LSE: np.ndarray,
    slot_of_expert_LE: np.ndarray,
    ranks: int,
    steps: int,
    experts_per_token: int,
    form: PressureForm = "sum",
) -> np.ndarray:
    """Return Q of each engine (paper 4.1 and 6): expert tokens per step on its ranks, in token equivalents.

    The form ``sum`` adds up the engine's ranks. The form ``max`` (ours) takes the fullest rank of each layer, for which
    the others wait. If an engine's tp ranks have equal loads, ``max`` is 1 / tp of ``sum``. The division by layers
    times experts per token is ours: a token routed to its own engine in every layer counts as 1. The result is 0
    if no step was counted.
    """
    layers, sources, _ = counts_LSE.shape
    load_LST = rank_load_LR(counts_LSE, slot_of_expert_LE, ranks).reshape(layers, sources, ranks // sources)
    load_LS = load_LST.max(axis=2) if form == "max" else load_LST.sum(axis=2)
    return load_LS.sum(axis=0) / (max(steps, 1) * layers * experts_per_token)
