"""Synthetic traffic windows that look like those of a real router.

A token of topic j chooses, in layer l, the k experts with the highest
``popularity * b[l, e] + topicality * u[l, j, e] + Gumbel noise``, with b and u standard normal
and fixed, as a trained router is. The form and its two weights are ours, chosen to come near what
was measured of Qwen3-30B-A3B (128 experts, top-8). tests/scheduler/test_windows.py compares: uneven
rank loads agree, but the few hottest experts are hotter here and the others more alike.
Axes: W windows, N requests, J topics; the others as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class WindowConfig:
    """What the traffic looks like. The defaults have the shape of Qwen3-30B-A3B on two engines."""

    layers: int = 48
    experts: int = 128
    experts_per_token: int = 8
    sources: int = 2
    topics: int = 8
    requests: int = 32
    """Of each source in a window. A request has one topic."""
    tokens_per_request: int = 64
    popularity: float = 1.05
    topicality: float = 1.0
    persistence: float = 0.0
    """Chance that a request has the topic of its source; all other requests have any, evenly.

    0: sources do not differ. 1: each source has one topic."""
    drift: float = 0.0
    """Chance that a source takes up another topic before the next window."""


@dataclass(frozen=True, eq=False)
class Window:
    """One window's traffic, and what only an offline profile knows of it."""

    counts_LSE: np.ndarray
    """Expert tokens, int64."""
    counts_NLE: np.ndarray
    """Expert tokens of each request, for ``sem_moe_plan``; their sums by source are ``counts_LSE``."""
    source_N: np.ndarray
    topic_N: np.ndarray
    transitions_LEE: np.ndarray
    """[L-1, E, E] int64: (token, its expert in layer l, its expert in layer l + 1), for ``moetuner_placement``."""


def synthetic_windows(config: WindowConfig, rng: np.random.Generator) -> Iterator[Window]:
    """Windows of one router, without end."""
    popularity_LE = config.popularity * rng.normal(size=(config.layers, config.experts))
    topicality_LJE = config.topicality * rng.normal(size=(config.layers, config.topics, config.experts))
    logits_LJE = popularity_LE[:, None] + topicality_LJE
    topic_S = np.arange(config.sources) % config.topics
    source_N = np.repeat(np.arange(config.sources), config.requests)
    while True:
        persists_N = rng.random(len(source_N)) < config.persistence
        topic_N = np.where(persists_N, topic_S[source_N], rng.integers(config.topics, size=len(source_N)))
        yield _window(logits_LJE, source_N, topic_N, config, rng)
        drifts_S = rng.random(config.sources) < config.drift
        step_S = rng.integers(1, max(config.topics, 2), size=config.sources)  # to any other topic
        topic_S = np.where(drifts_S, topic_S + step_S, topic_S) % config.topics


def _window(
    logits_LJE: np.ndarray, source_N: np.ndarray, topic_N: np.ndarray, config: WindowConfig, rng: np.random.Generator
) -> Window:
    requests, experts = len(source_N), config.experts
    counts_NLE = np.empty((requests, config.layers, experts), np.int64)
    transitions_LEE = np.empty((config.layers - 1, experts, experts), np.int64)
    before_TE = None
    for layer, logits_JE in enumerate(logits_LJE):
        noise_NTE = rng.gumbel(size=(requests, config.tokens_per_request, experts))
        chosen_NTE = _top_k(logits_JE[topic_N][:, None] + noise_NTE, config.experts_per_token)
        counts_NLE[:, layer] = chosen_NTE.sum(axis=1)
        chosen_TE = chosen_NTE.reshape(-1, experts).astype(np.float32)  # exact far beyond a window's tokens
        if before_TE is not None:
            transitions_LEE[layer - 1] = before_TE.T @ chosen_TE
        before_TE = chosen_TE
    counts_LSE = np.zeros((config.layers, config.sources, experts), np.int64)
    np.add.at(counts_LSE.swapaxes(0, 1), source_N, counts_NLE)
    return Window(counts_LSE, counts_NLE, source_N, topic_N, transitions_LEE)


def _top_k(logits_NTE: np.ndarray, k: int) -> np.ndarray:
    """Whether each expert is among the k with the highest logits."""
    chosen_NTE = np.zeros(logits_NTE.shape, bool)
    np.put_along_axis(chosen_NTE, np.argpartition(logits_NTE, -k, axis=2)[:, :, -k:], True, axis=2)
    return chosen_NTE
