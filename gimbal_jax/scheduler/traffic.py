"""What the routing counts of a window say under a placement: pure functions, exact integers until a ratio.

Axes: L MoE layers, S sources (DP engines), E experts, R ranks, T the tp ranks of one
source. The ranks of source ``s`` are ``s * tp .. s * tp + tp - 1`` with ``tp = R // S``.
Every rank has ``E // R`` slots, so slot ``p`` is on rank ``p // (E // R)``.
"""

from __future__ import annotations

import numpy as np

from gimbal_jax.config import MeshConfig, PressureForm
from gimbal_jax.scheduler.distance import away_SR


def rank_of_expert(slot_of_expert: np.ndarray, ranks: int) -> np.ndarray:
    """Rank that holds each expert; ``slot_of_expert`` is [E] or [L, E], and so is the answer."""
    return slot_of_expert // (slot_of_expert.shape[-1] // ranks)


def tokens_LSR(counts_LSE: np.ndarray, slot_of_expert_LE: np.ndarray, ranks: int) -> np.ndarray:
    """Expert tokens that each source sends to each rank."""
    layers, sources, experts = counts_LSE.shape
    by_slot_LSE = np.empty_like(counts_LSE)
    np.put_along_axis(by_slot_LSE, slot_of_expert_LE[:, None, :], counts_LSE, axis=2)
    return by_slot_LSE.reshape(layers, sources, ranks, experts // ranks).sum(axis=3)


def rank_load_LR(counts_LSE: np.ndarray, slot_of_expert_LE: np.ndarray, ranks: int) -> np.ndarray:
    """Expert tokens that each rank processes."""
    return tokens_LSR(counts_LSE.sum(axis=1, keepdims=True), slot_of_expert_LE, ranks)[:, 0]


def imbalance_L(counts_LSE: np.ndarray, slot_of_expert_LE: np.ndarray, ranks: int) -> np.ndarray:
    """Load of the fullest rank over the mean rank, per layer; 1.0 for a layer without traffic."""
    load_LR = rank_load_LR(counts_LSE, slot_of_expert_LE, ranks)
    total_L = load_LR.sum(axis=1)
    return np.where(total_L > 0, load_LR.max(axis=1) * ranks / np.maximum(total_L, 1), 1.0)


def balancedness_vllm(counts_LSE: np.ndarray, slot_of_expert_LE: np.ndarray, ranks: int) -> float:
    """vLLM's balancedness: sum over layers of the mean rank load over that of the fullest rank's; 0.0 without traffic.

    The rule of its EPLB log (vllm/distributed/eplb/eplb_state.py), which applies it to one step. Layers
    weigh by their fullest rank.
    """
    load_LR = rank_load_LR(counts_LSE, slot_of_expert_LE, ranks)
    fullest = load_LR.max(axis=1).sum()
    return float(load_LR.mean(axis=1).sum() / fullest) if fullest > 0 else 0.0


def balancedness_sglang(counts_LSE: np.ndarray, slot_of_expert_LE: np.ndarray, ranks: int) -> float:
    """SGLang's balancedness: mean over layers of (mean rank load + 1e-5) / (fullest rank's + 1e-5).

    The rule of its expert distribution log (sglang/srt/eplb/expert_distribution.py), which applies it to
    one step. All layers weigh alike; one without traffic counts as balanced.
    """
    load_LR = rank_load_LR(counts_LSE, slot_of_expert_LE, ranks)
    return float(((load_LR.mean(axis=1) + 1e-5) / (load_LR.max(axis=1) + 1e-5)).mean())


def merge_windows(counts_WLSE: np.ndarray) -> np.ndarray:
    """The windows as one, counts_LSE. Counts are by logical expert, so placements in between do not matter."""
    return counts_WLSE.sum(axis=0)


def smooth_windows(earlier_LSE: np.ndarray, window_LSE: np.ndarray, smoothing: float) -> np.ndarray:
    """The window plus ``smoothing`` times the sum of earlier ones, itself smoothed: exponential decay by window.

    0 gives the window itself; then counts stay integers.
    """
    return window_LSE + smoothing * earlier_LSE if smoothing else window_LSE


def remote_tokens_L(counts_LSE: np.ndarray, slot_of_expert_LE: np.ndarray, ranks: int) -> np.ndarray:
    """Expert tokens processed outside their source's own ranks, per layer."""
    layers, sources, _ = counts_LSE.shape
    sent_LSR = tokens_LSR(counts_LSE, slot_of_expert_LE, ranks)
    sent_LSST = sent_LSR.reshape(layers, sources, sources, ranks // sources)
    return sent_LSR.sum(axis=(1, 2)) - np.einsum("lsst->l", sent_LSST)


def remote_share(counts_LSE: np.ndarray, slot_of_expert_LE: np.ndarray, ranks: int) -> float:
    """Share of all expert tokens that leave their source's ranks; 0.0 without traffic."""
    total = int(counts_LSE.sum())
    return int(remote_tokens_L(counts_LSE, slot_of_expert_LE, ranks).sum()) / total if total else 0.0


def far_tokens_L(counts_LSE: np.ndarray, slot_of_expert_LE: np.ndarray, mesh: MeshConfig) -> np.ndarray:
    """Expert tokens processed outside their source's node, per layer; as ``away_SR`` has it where it has several."""
    return (tokens_LSR(counts_LSE, slot_of_expert_LE, mesh.ranks) * away_SR(mesh)).sum(axis=(1, 2))


def far_share(counts_LSE: np.ndarray, slot_of_expert_LE: np.ndarray, mesh: MeshConfig) -> float:
    """Share of all expert tokens that leave their source's node; 0.0 without traffic."""
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
    """Q of each engine (paper 4.1 and 6): expert tokens per step on its ranks, in token equivalents.

    ``sum`` adds up the engine's ranks. ``max`` (ours) takes the fullest of them in each layer, for
    which the others wait; an engine whose tp ranks are even has 1 / tp of its sum. Dividing by
    layers times experts per token is ours: a token routed to its own engine in every layer then
    weighs 1. Zeros when no step was counted.
    """
    layers, sources, _ = counts_LSE.shape
    load_LST = rank_load_LR(counts_LSE, slot_of_expert_LE, ranks).reshape(layers, sources, ranks // sources)
    load_LS = load_LST.max(axis=2) if form == "max" else load_LST.sum(axis=2)
    return load_LS.sum(axis=0) / (max(steps, 1) * layers * experts_per_token)
