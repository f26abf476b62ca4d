"""Synthetic traffic windows that resemble those of a real router.

In layer l, a token of topic j chooses the k experts with the highest
``popularity * b[l, e] + topicality * u[l, j, e] + Gumbel noise``. b and u are standard normal and fixed, like a trained
router. The form and its two weights are ours, chosen to come near measurements of Qwen3-30B-A3B (128 experts, top-8).
tests/scheduler/test_windows.py compares them: the unevenness of rank loads agrees, but here the few hottest experts are
hotter and the others more alike.
Axes: L MoE layers, S sources (DP engines), E experts, N requests, J topics, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class WindowConfig:
    """Parameters of the traffic. The defaults have the shape of Qwen3-30B-A3B on two engines."""

    layers: int = 48
    """MoE layers."""
    experts: int = 128
    """Experts per layer."""
    experts_per_token: int = 8
    """Experts that a token chooses in each layer."""
    sources: int = 2
    """Sources (DP engines)."""
    topics: int = 8
    """Topics that requests can have."""
    requests: int = 32
    """Requests of each source in a window. A request has one topic."""
    tokens_per_request: int = 64
    """Tokens of each request."""
    popularity: float = 1.05
    """Weight of the preferences that all topics share."""
    topicality: float = 1.0
    """Weight of the preferences that each topic has of its own; 0 if topics do not differ."""
    persistence: float = 0.0
    """Probability that a request has the topic of its source. Other requests have a uniformly random topic.

    0: sources do not differ. 1: each source has one topic."""
    drift: float = 0.0
    """Probability that a source changes its topic before the next window."""


@dataclass(frozen=True, eq=False)
class Window:
    """One window's traffic, with the details that only an offline profile has."""

    counts_LSE: np.ndarray
    """Expert tokens by layer, source and expert, int64."""
    counts_NLE: np.ndarray
    """Expert tokens of each request, for ``sem_moe_plan``; the sums by source are ``counts_LSE``."""
    source_N: np.ndarray
    """Source of each request."""
    topic_N: np.ndarray
    """Topic of each request."""
    transitions_LEE: np.ndarray
    """[L-1, E, E] int64: (token, its expert in layer l, its expert in layer l + 1), for ``moetuner_placement``."""


def synthetic_windows(config: WindowConfig, rng: np.random.Generator) -> Iterator[Window]:
    """Yield windows of one router, without end."""
    popularity_LE = config.popularity * rng.normal(size=(config.layers, config.experts))
    topicality_LJE = config.topicality * rng.normal(size=(config.layers, config.topics, config.experts))
    logits_LJE = popularity_LE[:, None] + topicality_LJE
    topic_S = np.arange(config.sources) % config.topics
    source_N = np.repeat(np.arange(config.sources), config.requests)
    while True:
        # Choose the topic of each request, count the window, and let the topics of the sources drift.
        persists_N = rng.random(len(source_N)) < config.persistence
        topic_N = np.where(persists_N, topic_S[source_N], rng.integers(config.topics, size=len(source_N)))
        yield _window(logits_LJE, source_N, topic_N, config, rng)
        drifts_S = rng.random(config.sources) < config.drift
        step_S = rng.integers(1, max(config.topics, 2), size=config.sources)  # to any other topic
        topic_S = np.where(drifts_S, topic_S + step_S, topic_S) % config.topics


def _window(
    logits_LJE: np.ndarray, source_N: np.ndarray, topic_N: np.ndarray, config: WindowConfig, rng: np.random.Generator
) -> Window:
    """Return one window with requests of these sources and topics."""
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
    """Return whether each expert is among the k with the highest logits."""
    chosen_NTE = np.zeros(logits_NTE.shape, bool)
    np.put_along_axis(chosen_NTE, np.argpartition(logits_NTE, -k, axis=2)[:, :, -k:], True, axis=2)
    return chosen_NTE
