"""Placement of experts before a run, for offline systems. For Sem-MoE also the assignment of requests to engines.

Traffic is profiled on the router's own bank of tokens, weighted by the tokens of the requests on each topic. The result
is the expected count of a long run with that traffic, without noise.
Axes: J profiles of the bank (prompt and output of each topic), N requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gimbal_jax.config import MeshConfig, OfflinePolicy
from gimbal_jax.scheduler.assignment import assign
from gimbal_jax.scheduler.baselines.moetuner import moetuner_placement
from gimbal_jax.scheduler.baselines.sem_moe import sem_moe_plan
from gimbal_jax.scheduler.traffic import rank_of_expert
from gimbal_jax.simulation.routing import BANK_TOKENS, Router
from gimbal_jax.simulation.workload import Arrival

SEM_MOE_SAMPLE = 64
"""Number of evenly spaced requests by which Sem-MoE places experts. Then it assigns all requests to engines."""


def place_offline(
    policy: OfflinePolicy,
    router: Router,
    arrivals: Sequence[Arrival],
    earlier: Sequence[Arrival],
    mesh: MeshConfig,
    rng: np.random.Generator,
) -> tuple[np.ndarray, tuple[Arrival, ...]]:
    """Return slot_of_expert_LE at the start, and the arrivals, with engines if the policy assigns them.

    ``moetuner`` knows the traffic of ``earlier``. ``sem_moe`` is an oracle that knows the traffic of ``arrivals``. It
    assigns requests to the engines that hold most of their experts. Each engine gets at most ceil(N / S) requests over
    the whole run, at any times. Requests count equally there, independently of their length. If they counted by
    tokens, an engine with long requests would get all popular experts, and these would draw more long requests.
    """
    match policy:
        case "moetuner":
            by_source = [tokens_NJ(router, earlier, source).sum(axis=0) for source in range(mesh.dp)]
            return _moetuner(router, np.mean(by_source, axis=0), mesh.ranks), tuple(arrivals)
        case "sem_moe":
            return _sem_moe(router, arrivals, mesh, rng)


def tokens_NJ(router: Router, arrivals: Sequence[Arrival], source: int) -> np.ndarray:
    """Return the tokens of each request on each profile, if all requests go to ``source``."""
    counted_NJ = np.zeros((len(arrivals), 2 * router.topics))
    for n, arrival in enumerate(arrivals):
        prompt = router.prompt_token(arrival.topic)
        counted_NJ[n, router.profile(prompt, source, arrival.time_s)] = arrival.input_tokens
        output = router.profile(router.output_token(prompt), source, arrival.time_s)
        counted_NJ[n, output] = arrival.output_tokens - 1  # the last token is never computed
    return counted_NJ


def chosen_JLE(router: Router) -> np.ndarray:
    """Return the mean expert tokens [J, L, E] of one token of each profile."""
    return router.blocks_JXLE.sum(axis=1) / BANK_TOKENS


def transitions_LEE(router: Router, tokens_J: np.ndarray) -> np.ndarray:
    """Return the expected pairs of experts in consecutive layers [L-1, E, E] that ``tokens_J`` make."""
    total_LEE = np.zeros((router.layers - 1, router.experts, router.experts))
    for profile in np.flatnonzero(tokens_J):
        chosen_LNE = np.zeros((router.layers, BANK_TOKENS, router.experts), np.float32)
        np.put_along_axis(chosen_LNE, router.chosen_JNLk[profile].swapaxes(0, 1), 1, axis=2)
        pairs_LEE = chosen_LNE[:-1].swapaxes(1, 2) @ chosen_LNE[1:]
        total_LEE += pairs_LEE * (tokens_J[profile] / BANK_TOKENS)
    return total_LEE


def _moetuner(router: Router, tokens_J: np.ndarray, ranks: int) -> np.ndarray:
    load_LE = np.tensordot(tokens_J, chosen_JLE(router), axes=1)
    return moetuner_placement(load_LE, transitions_LEE(router, tokens_J), ranks)


def _sem_moe(
    router: Router, arrivals: Sequence[Arrival], mesh: MeshConfig, rng: np.random.Generator
) -> tuple[np.ndarray, tuple[Arrival, ...]]:
    tokens_SNJ = np.stack([tokens_NJ(router, arrivals, source) for source in range(mesh.dp)])
    share_SNJ = tokens_SNJ / tokens_SNJ.sum(axis=2, keepdims=True)
    profile_JLE = chosen_JLE(router)
    sampled = np.linspace(0, len(arrivals) - 1, min(SEM_MOE_SAMPLE, len(arrivals))).round().astype(int)
    # A request with its source's own topic has no source yet, so the sampled requests rotate over the sources.
    chosen_NLE = np.tensordot(share_SNJ[np.arange(len(sampled)) % mesh.dp, sampled], profile_JLE, axes=1)
    plan = sem_moe_plan(chosen_NLE, mesh.dp, mesh.ranks, rng)
    source_LE = rank_of_expert(plan.slot_of_expert_LE, mesh.ranks) // mesh.tp
    # Share of each request's expert tokens that stays local on each engine; requests go where it is high.
    local_SJ = np.stack([(profile_JLE * (source_LE == source)).sum(axis=(1, 2)) for source in range(mesh.dp)])
    local_NS = np.stack([share_SNJ[source] @ local_SJ[source] for source in range(mesh.dp)], axis=1)
    engine_N = assign(local_NS, -(-len(arrivals) // mesh.dp))
    pinned = tuple(replace(arrival, engine=int(engine)) for arrival, engine in zip(arrivals, engine_N, strict=True))
    return plan.slot_of_expert_LE, pinned
