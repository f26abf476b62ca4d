"""Sem-MoE's co-scheduling (Li et al., arXiv:2503.04398) as an oracle, an offline baseline of the paper (7.1).

Axes: N requests, L MoE layers, E experts, S sources (DP engines), X sources of all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gimbal_jax.scheduler.assignment import assign
from gimbal_jax.scheduler.eplb import packed_rank_LE
from gimbal_jax.scheduler.placement import assign_slots, static_placement

MAX_ROUNDS = 50
"""Most rounds of one start. The search converges in far fewer."""


@dataclass(frozen=True, eq=False)
class SemMoePlan:
    """The engine of each profiled request and the placement of the experts, chosen together."""

    engine_N: np.ndarray
    """Engine of each request."""
    slot_of_expert_LE: np.ndarray
    """Placement: slot of each expert."""
    local_share: float
    """Share of the expert tokens that stay on the ranks of their request's engine."""


def sem_moe_plan(
    counts_NLE: np.ndarray, sources: int, ranks: int, rng: np.random.Generator, starts: int = 8
) -> SemMoePlan:
    """Place requests and experts together so that most expert tokens stay local. An oracle: it knows the routing.

    ``counts_NLE`` counts the expert tokens of each request. The search starts from a random even map of requests to
    engines and alternates two exact steps. First, the experts of every layer go to engines, E / S each. Then, the
    requests go to engines, at most ceil(N / S) each. The local tokens never fall, and a start ends when they no
    longer rise. The best of ``starts`` starts is kept. Within an engine, experts are packed onto its ranks by load.
    Ours: the limits are on the numbers of experts and requests, not on their load.
    Raises ValueError if S does not divide the ranks.
    """
    requests, layers, experts = counts_NLE.shape
    if ranks % sources:
        raise ValueError(f"{ranks} ranks cannot be split over {sources} sources")
    static_LE = static_placement(layers, experts, ranks)
    plans = [
        _alternate(counts_NLE, rng.permutation(requests) * sources // max(requests, 1), sources) for _ in range(starts)
    ]
    local, engine_N, source_LE = max(plans, key=lambda plan: plan[0])
    rank_LE = _ranks_within_sources(source_LE, counts_NLE.sum(axis=0), sources, ranks)
    slot_of_expert_LE = assign_slots(rank_LE, static_LE, ranks)
    return SemMoePlan(engine_N, slot_of_expert_LE, float(local / max(counts_NLE.sum(), 1)))


def _alternate(counts_NLE: np.ndarray, engine_N: np.ndarray, sources: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Run one start. Returns the local tokens, the engine of each request [N] and the source of each expert [L, E]."""
    requests, _, experts = counts_NLE.shape
    engine_of = np.arange(sources)
    best = -1
    for _ in range(MAX_ROUNDS):
        # Experts to the engines whose requests use them most.
        counts_LES = np.einsum("nle,ns->les", counts_NLE, (engine_N[:, None] == engine_of).astype(counts_NLE.dtype))
        source_LE = np.stack([assign(counts_ES, experts // sources) for counts_ES in counts_LES])
        # Requests to the engines that hold most of their experts.
        local_NS = np.stack([(counts_NLE * (source_LE == source)).sum(axis=(1, 2)) for source in engine_of], axis=1)
        engine_N = assign(local_NS, -(-requests // sources))
        local = int(local_NS[np.arange(requests), engine_N].sum())
        if local <= best:
            break
        best = local
    return local, engine_N, source_LE


def _ranks_within_sources(source_LE: np.ndarray, load_LE: np.ndarray, sources: int, ranks: int) -> np.ndarray:
    """Return the rank of each expert [L, E]: the experts of each source packed by load onto its tp ranks."""
    layers, experts = source_LE.shape
    tp, share = ranks // sources, experts // sources
    # Sort the experts by source, E / S each, pack them, and undo the sort.
    expert_LE = np.argsort(source_LE, axis=1, kind="stable")
    packed_XE = packed_rank_LE(np.take_along_axis(load_LE, expert_LE, axis=1).reshape(-1, share), tp)
    rank_LE = np.empty_like(expert_LE)
    ranks_LE = packed_XE.reshape(layers, experts) + np.repeat(np.arange(sources) * tp, share)
    np.put_along_axis(rank_LE, expert_LE, ranks_LE, axis=1)
    return rank_LE
