"""Sem-MoE's co-scheduling (Li et al., arXiv:2503.04398) as an oracle, the offline baseline of the paper (7.1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gimbal_jax.scheduler.assignment import assign
from gimbal_jax.scheduler.eplb import packed_rank_LE
from gimbal_jax.scheduler.placement import assign_slots, static_placement

MAX_ROUNDS = 50
"""Rounds of one start, far more than it takes to stand still."""


@dataclass(frozen=True, eq=False)
class SemMoePlan:
    """Which engine gets each profiled request, and where the experts are, for both together."""

    engine_N: np.ndarray
    slot_of_expert_LE: np.ndarray
    local_share: float
    """Share of the expert tokens that stay on their engine's ranks."""


def sem_moe_plan(
    counts_NLE: np.ndarray, sources: int, ranks: int, rng: np.random.Generator, starts: int = 8
) -> SemMoePlan:
    """Requests and experts placed together so that most expert tokens stay at home; an oracle: it knows the routing.

    ``counts_NLE``: expert tokens of each request N. From a random even map of requests to engines, in turn:
    every layer's experts go to engines, E / S each, and the requests go to engines, at most ceil(N / S)
    each; both steps are exact, so the local tokens only rise, until they stand still. The best of
    ``starts`` such maps is kept. Inside an engine, experts are packed onto its ranks by load.
    Ours: the limits are on numbers of experts and of requests, not on their load.
    Raises ValueError where S does not divide the ranks.
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
    """(local tokens, engine of each request, source of each expert) of one start."""
    requests, _, experts = counts_NLE.shape
    engine_of = np.arange(sources)
    best = -1
    for _ in range(MAX_ROUNDS):
        counts_LES = np.einsum("nle,ns->les", counts_NLE, (engine_N[:, None] == engine_of).astype(counts_NLE.dtype))
        source_LE = np.stack([assign(counts_ES, experts // sources) for counts_ES in counts_LES])
        local_NS = np.stack([(counts_NLE * (source_LE == source)).sum(axis=(1, 2)) for source in engine_of], axis=1)
        engine_N = assign(local_NS, -(-requests // sources))
        local = int(local_NS[np.arange(requests), engine_N].sum())
        if local <= best:
            break
        best = local
    return local, engine_N, source_LE


def _ranks_within_sources(source_LE: np.ndarray, load_LE: np.ndarray, sources: int, ranks: int) -> np.ndarray:
    layers, experts = source_LE.shape
    tp, share = ranks // sources, experts // sources
    expert_LE = np.argsort(source_LE, axis=1, kind="stable")  # grouped by source, E / S each
    packed_XE = packed_rank_LE(np.take_along_axis(load_LE, expert_LE, axis=1).reshape(-1, share), tp)
    rank_LE = np.empty_like(expert_LE)
    ranks_LE = packed_XE.reshape(layers, experts) + np.repeat(np.arange(sources) * tp, share)
    np.put_along_axis(rank_LE, expert_LE, ranks_LE, axis=1)
    return rank_LE
