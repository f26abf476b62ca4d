"""Offline systems: experts, and for Sem-MoE the engines of requests, placed before a run by what a profile knows.

A profile is the router's own bank of tokens, weighted by the tokens that the requests have on each topic: what a long
run with that traffic would count, without its noise.
J: profiles of the bank, a prompt's and an output's for each topic; N: requests.
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
"""Requests, evenly spaced, that Sem-MoE places experts by; then all requests go to engines."""


def place_offline(
    policy: OfflinePolicy,
    router: Router,
    arrivals: Sequence[Arrival],
    earlier: Sequence[Arrival],
    mesh: MeshConfig,
    rng: np.random.Generator,
) -> tuple[np.ndarray, tuple[Arrival, ...]]:
    """slot_of_expert_LE to start from, and the arrivals, with engines if the policy gives them.

    ``moetuner`` knows the traffic of ``earlier``. ``sem_moe`` is an oracle and knows that of ``arrivals``: every
    request goes to the engine that holds most of its experts, at most ceil(N / S) to each over the whole run, whenever
    they come. All requests weigh alike in it, however long they are: by tokens, an engine with the long ones would get
    all popular experts, and these draw more long ones.
    """
    match policy:
        case "moetuner":
            by_source = [tokens_NJ(router, earlier, source).sum(axis=0) for source in range(mesh.dp)]
            return _moetuner(router, np.mean(by_source, axis=0), mesh.ranks), tuple(arrivals)
        case "sem_moe":
            return _sem_moe(router, arrivals, mesh, rng)


def tokens_NJ(router: Router, arrivals: Sequence[Arrival], source: int) -> np.ndarray:
    """Tokens of each request on each profile, if it goes to this source."""
    counted_NJ = np.zeros((len(arrivals), 2 * router.topics))
    for n, arrival in enumerate(arrivals):
        prompt = router.prompt_token(arrival.topic)
        counted_NJ[n, router.profile(prompt, source, arrival.time_s)] = arrival.input_tokens
        output = router.profile(router.output_token(prompt), source, arrival.time_s)
        counted_NJ[n, output] = arrival.output_tokens - 1  # the last one is never computed
    return counted_NJ


def chosen_JLE(router: Router) -> np.ndarray:
    """Expert tokens that one token of each profile makes, on average."""
    return router.blocks_JXLE.sum(axis=1) / BANK_TOKENS


def transitions_LEE(router: Router, tokens_J: np.ndarray) -> np.ndarray:
    """[L-1, E, E]: pairs of a token's experts in consecutive layers, as many as these tokens make."""
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
    # Requests on their source's topic are taken to be at each source in turn.
    chosen_NLE = np.tensordot(share_SNJ[np.arange(len(sampled)) % mesh.dp, sampled], profile_JLE, axes=1)
    plan = sem_moe_plan(chosen_NLE, mesh.dp, mesh.ranks, rng)
    source_LE = rank_of_expert(plan.slot_of_expert_LE, mesh.ranks) // mesh.tp
    local_SJ = np.stack([(profile_JLE * (source_LE == source)).sum(axis=(1, 2)) for source in range(mesh.dp)])
    local_NS = np.stack([share_SNJ[source] @ local_SJ[source] for source in range(mesh.dp)], axis=1)
    engine_N = assign(local_NS, -(-len(arrivals) // mesh.dp))
    pinned = tuple(replace(arrival, engine=int(engine)) for arrival, engine in zip(arrivals, engine_N, strict=True))
    return plan.slot_of_expert_LE, pinned
