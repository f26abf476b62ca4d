"""Synthetic routers: which experts the tokens of a topic choose, as a trained router would.

A token of topic j chooses, in layer l, the k experts with the highest
``popularity * b[l, e] + topicality * u[l, j, e] + phase * v[l, prefill or decode, e] + Gumbel noise``
(b, u, v standard normal, fixed per router), the form of ``scheduler.windows``. A router keeps a bank of tokens drawn
so; a simulated token takes the choices of one of them. Or the logits follow from the counts of a real server.

The ids of simulated tokens say how they route, so that they pass through the real engine: ``2 * topic`` in a prompt,
``2 * topic + 1`` in an output; the topic after the last one stands for "its source's own".
Axes: J topics, N tokens of the bank, B tokens of a step; the others as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BANK_TOKENS = 512
BLOCK_TOKENS = 32
"""Prefill chunks take whole blocks of the bank, and single tokens for what is left."""


@dataclass(frozen=True)
class RoutingConfig:
    """What the traffic looks like. The defaults have the shape of Qwen3-30B-A3B (see ``scheduler.windows``)."""

    topics: int = 8
    popularity: float = 1.05
    topicality: float = 1.0
    phase: float = 0.35
    """How much output tokens route otherwise than prompt tokens of their topic."""
    persistence: float = 0.0
    """Chance that a request has the topic of its source, whichever engine that turns out to be.

    0: sources do not differ but by chance. 1: each source has one topic, as if a router by topic stood before."""
    trend: float = 0.0
    """Chance that any other request has the topic that is in fashion."""
    trend_s: float = 60.0
    """How long a fashion lasts, and how long a source keeps its topic."""


BALANCED = RoutingConfig(topics=1, popularity=0.0, topicality=0.0, phase=0.0)
"""Every expert equally likely."""


class Router:
    """A fixed router as a bank of choices. Its tables are never written to."""

    def __init__(self, logits_LJE: np.ndarray, k: int, config: RoutingConfig, rng: np.random.Generator) -> None:
        """``logits_LJE``: two profiles for each topic, its prompt's and its output's."""
        layers, profiles, experts = logits_LJE.shape
        self.config = config
        self.experts, self.layers, self.k = experts, layers, k
        # The k first arrivals of exponential clocks are the k highest logits with Gumbel noise.
        rate_JLE = np.exp(logits_LJE - logits_LJE.max(axis=2, keepdims=True)).astype(np.float32).swapaxes(0, 1)
        self.chosen_JNLk = np.empty((profiles, BANK_TOKENS, layers, k), np.int16)
        """Experts that each token of the bank chose."""
        for profile in range(profiles):
            clock_NLE = rng.standard_exponential((BANK_TOKENS, layers, experts), np.float32) / rate_JLE[profile]
            self.chosen_JNLk[profile] = np.argpartition(clock_NLE, k - 1, axis=2)[:, :, :k]
        blocks_JXNLk = self.chosen_JNLk.reshape(profiles, -1, BLOCK_TOKENS, layers, k)
        self.blocks_JXLE = np.stack([[_counts_LE(block, experts) for block in blocks] for blocks in blocks_JXNLk])
        """Counts of each block of the bank, float64 and whole."""

    @property
    def topics(self) -> int:
        return len(self.chosen_JNLk) // 2

    def own_topic(self, source: int, time: float) -> int:
        """The topic of a source; also what is in fashion, for source 0."""
        return (source + int(time / self.config.trend_s)) % self.topics

    def draw_topics(self, times_s: Sequence[float], rng: np.random.Generator) -> list[int | None]:
        """A topic for each request that arrives at one of these times; None is its source's own."""
        drawn: list[int | None] = []
        for time_s in times_s:
            persists, follows = rng.random(2)
            topic = int(rng.integers(self.topics))
            if follows < self.config.trend:
                topic = self.own_topic(0, time_s)
            drawn.append(None if persists < self.config.persistence else topic)
        return drawn

    def prompt_token(self, topic: int | None) -> int:
        """The id that all tokens of a prompt on this topic have."""
        return 2 * (self.topics if topic is None else topic)

    @staticmethod
    def output_token(token_id: int) -> int:
        """The id of the token after one of this id."""
        return token_id | 1

    def profile(self, token_id: int, source: int, time: float) -> int:
        """Row of the bank for a token of this id at a source."""
        topic, output = divmod(token_id, 2)
        return 2 * (self.own_topic(source, time) if topic == self.topics else topic) + output

    def count_tokens(
        self, profile_B: np.ndarray, source_B: np.ndarray, sources: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Expert tokens [L, S, E] of single tokens."""
        chosen_BLk = self.chosen_JNLk[profile_B, rng.integers(BANK_TOKENS, size=len(profile_B))]
        layer_L = np.arange(self.layers)[:, None] * (sources * self.experts)
        place_BLk = layer_L + (source_B * self.experts)[:, None, None] + chosen_BLk
        shape = (self.layers, sources, self.experts)
        return np.bincount(place_BLk.reshape(-1), minlength=np.prod(shape)).reshape(shape)

    def count_blocks(self, profile: int, blocks: int, rng: np.random.Generator) -> np.ndarray:
        """Expert tokens [L, E] of ``blocks * BLOCK_TOKENS`` tokens of one profile."""
        available = self.blocks_JXLE.shape[1]
        times_X = np.bincount(rng.integers(available, size=blocks), minlength=available).astype(np.float64)
        return np.tensordot(times_X, self.blocks_JXLE[profile], axes=1).astype(np.int64)


def _counts_LE(chosen_NLk: np.ndarray, experts: int) -> np.ndarray:
    layers = chosen_NLk.shape[1]
    place = np.arange(layers)[:, None] * experts + chosen_NLk
    return np.bincount(place.reshape(-1), minlength=layers * experts).reshape(layers, experts).astype(np.float64)


def synthetic_router(config: RoutingConfig, layers: int, experts: int, k: int, seed: int) -> Router:
    """A router drawn by ``seed``."""
    rng = np.random.default_rng(seed)
    popularity_LE = config.popularity * rng.normal(size=(layers, experts))
    topicality_LJE = config.topicality * rng.normal(size=(layers, config.topics, experts))
    phase_LPE = config.phase * rng.normal(size=(layers, 2, experts))
    logits_LJPE = popularity_LE[:, None, None] + topicality_LJE[:, :, None] + phase_LPE[:, None]
    return Router(logits_LJPE.reshape(layers, 2 * config.topics, experts), k, config, rng)
