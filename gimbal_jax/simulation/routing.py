"""Synthetic routers, which choose experts for the tokens of a topic with the statistics of a trained router.

A token of topic j chooses, in layer l, the k experts with the highest
``popularity * b[l, e] + topicality * u[l, j, e] + phase * v[l, prefill or decode, e] + Gumbel noise``
(b, u, v standard normal, fixed per router), the form of ``scheduler.windows``. A router draws a bank of tokens from
this rule once, and each simulated token takes the choices of one of them. A bank can also follow from the counts of a
real server.

Ids of simulated tokens encode their routing, so that the real engine carries it. A prompt on a topic has the id
``2 * topic``, and its output ``2 * topic + 1``. The topic after the last one stands for the source's own topic.
Axes: J topics or profiles, N tokens of the bank, X blocks of the bank, B tokens of a step. The others are the common
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

BANK_TOKENS = 512
BLOCK_TOKENS = 32
"""Tokens of a block of the bank. Prefill chunks take whole blocks, and single tokens for the rest."""


@dataclass(frozen=True)
class RoutingConfig:
    """Statistics of the traffic. The defaults match Qwen3-30B-A3B (see ``scheduler.windows``)."""

    topics: int = 8
    popularity: float = 1.05
    topicality: float = 1.0
    phase: float = 0.35
    """Weight of the difference in routing between output and prompt tokens of a topic."""
    persistence: float = 0.0
    """Chance that a request has the topic of its source, which is the engine that dispatch chooses.

    With 0, sources differ by chance only. With 1, each source has one topic, as behind a router by topic."""
    trend: float = 0.0
    """Chance that a request without its source's topic has the topic in fashion."""
    trend_s: float = 60.0
    """Seconds that a fashion lasts, and that a source keeps its topic."""


BALANCED = RoutingConfig(topics=1, popularity=0.0, topicality=0.0, phase=0.0)
"""Routing in which every expert is equally likely."""


class Router:
    """A fixed router as a bank of choices. Its tables are never written to.

    Attributes:
      layers: number of layers.
      k: experts per token.
      experts: number of experts.
      chosen_JNLk: experts of each token of the bank, int16.
      blocks_JXLE: expert counts of each block of the bank, whole numbers in float64.
    """

    def __init__(self, chosen_JNLk: np.ndarray, experts: int, config: RoutingConfig, next_topic: int = 1) -> None:
        """Make a router from the experts ``chosen_JNLk`` of each token of the bank.

        A topic has two profiles, one of its prompts and one of its outputs. Every ``trend_s`` seconds the topic of a
        source advances by ``next_topic``.
        """
        profiles, tokens, self.layers, self.k = chosen_JNLk.shape
        self.config, self.experts = config, experts
        self.chosen_JNLk = chosen_JNLk.astype(np.int16)
        blocks_JXNLk = chosen_JNLk.reshape(profiles, tokens // BLOCK_TOKENS, BLOCK_TOKENS, self.layers, self.k)
        self.blocks_JXLE = np.stack([[_counts_LE(block, experts) for block in blocks] for blocks in blocks_JXNLk])
        # Flat places l * E + e (axis C) make single tokens countable by one bincount. A small type saves memory.
        place_JNLk = np.arange(self.layers)[:, None] * experts + self.chosen_JNLk
        place_type = np.min_scalar_type(self.layers * experts - 1)
        self._place_JNC = place_JNLk.reshape(profiles, tokens, -1).astype(place_type)
        # Counts of all blocks before each one, over two rounds of the bank, so that a run of blocks may wrap around.
        twice_JXLE = np.concatenate([self.blocks_JXLE] * 2, axis=1)
        self._before_JXLE = np.insert(twice_JXLE.cumsum(axis=1), 0, 0, axis=1).astype(np.int32)
        self._next_topic = next_topic

    @property
    def topics(self) -> int:
        return len(self.chosen_JNLk) // 2

    @property
    def token_ids(self) -> int:
        """Number of token ids. They start at 0."""
        return 2 * (self.topics + 1)

    def own_topic[T: (int, np.ndarray)](self, source: T, time: float) -> T:
        """Return the topic of a source at a time. The topic of source 0 is also the topic in fashion."""
        return (source + self._next_topic * int(time / self.config.trend_s)) % self.topics

    def draw_topics(self, times_s: Sequence[float], rng: np.random.Generator) -> list[int | None]:
        """Return a topic for a request at each of these times. None stands for its source's own topic."""
        drawn: list[int | None] = []
        for time_s in times_s:
            persists, follows = rng.random(2)
            topic = int(rng.integers(self.topics))
            if follows < self.config.trend:
                topic = self.own_topic(0, time_s)
            drawn.append(None if persists < self.config.persistence else topic)
        return drawn

    def prompt_token(self, topic: int | None) -> int:
        """Return the id of all tokens of a prompt on this topic."""
        return 2 * (self.topics if topic is None else topic)

    @staticmethod
    def output_token(token_id: int) -> int:
        """Return the id of the output token after a token with this id."""
        return token_id | 1

    def profile[T: (int, np.ndarray)](self, token_id: T, source: T, time: float) -> T:
        """Return the row of the bank for a token of this id at a source. Both may be arrays."""
        own = token_id >= 2 * self.topics
        return token_id + own * (2 * self.own_topic(source, time) - 2 * self.topics)

    def count_tokens(
        self, profile_B: np.ndarray, source_B: np.ndarray, sources: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Return the expert tokens [L, S, E] of single tokens, each drawn from the bank independently."""
        # Sorted by source, the tokens of a source are one slice, which one bincount counts.
        order_B = np.argsort(source_B, kind="stable")
        place_BC = self._place_JNC[profile_B[order_B], rng.integers(BANK_TOKENS, size=len(order_B))]
        ends_S = np.cumsum(np.bincount(source_B, minlength=sources))
        counts_SC = np.empty((sources, self.layers * self.experts), np.int64)
        for s, mine_BC in enumerate(np.split(place_BC, ends_S[:-1])):
            counts_SC[s] = np.bincount(mine_BC.reshape(-1), minlength=self.layers * self.experts)
        return counts_SC.reshape(sources, self.layers, self.experts).swapaxes(0, 1)

    def count_blocks(self, profile: int, blocks: int, rng: np.random.Generator) -> np.ndarray:
        """Return the expert tokens [L, E] of ``blocks`` consecutive blocks of a profile, from a random first block."""
        available = self.blocks_JXLE.shape[1]
        rounds, rest = divmod(blocks, available)
        first = int(rng.integers(available))
        before_XLE = self._before_JXLE[profile]
        return rounds * before_XLE[available] + before_XLE[first + rest] - before_XLE[first]


def _counts_LE(chosen_NLk: np.ndarray, experts: int) -> np.ndarray:
    layers = chosen_NLk.shape[1]
    place = np.arange(layers)[:, None] * experts + chosen_NLk
    return np.bincount(place.reshape(-1), minlength=layers * experts).reshape(layers, experts).astype(np.float64)


def synthetic_router(config: RoutingConfig, layers: int, experts: int, k: int, seed: int) -> Router:
    """Return a router drawn with ``seed``."""
    rng = np.random.default_rng(seed)
    popularity_LE = config.popularity * rng.normal(size=(layers, experts))
    topicality_JLE = config.topicality * rng.normal(size=(config.topics, layers, experts))
    phase_PLE = config.phase * rng.normal(size=(2, layers, experts))
    chosen = []
    for topic_LE, phase_LE in product(topicality_JLE, phase_PLE):
        # The k first of exponential clocks are the k highest logits with Gumbel noise, and cheaper to draw.
        rate_LE = np.exp(popularity_LE + topic_LE + phase_LE).astype(np.float32)
        time_NLE = rng.standard_exponential((BANK_TOKENS, layers, experts), np.float32) / rate_LE
        chosen.append(np.argpartition(time_NLE, k - 1, axis=2)[:, :, :k])
    return Router(np.stack(chosen), experts, config)


def recorded_router(counts_WLSE: np.ndarray, k: int, window_s: float, seed: int) -> Router:
    """Return a router whose traffic of each source repeats the windows that a real server counted.

    Every request has its source's own topic. Prompts and outputs route alike, because counts do not separate them. A
    token chooses expert e with probability k * share of e (at most 1), by systematic sampling in random order.
    Raises ValueError for a layer without traffic.
    """
    windows, layers, sources, experts = counts_WLSE.shape
    counts_JLE = counts_WLSE.swapaxes(1, 2).reshape(windows * sources, layers, experts)
    if not counts_JLE.any(axis=2).all():
        raise ValueError("counts: every window needs traffic from every source in every layer")
    rng = np.random.default_rng(seed)
    chosen_JNLk = np.stack([_systematic_NLk(counts_LE, k, rng) for counts_LE in counts_JLE])
    config = RoutingConfig(topics=windows * sources, persistence=1.0, trend_s=window_s)
    return Router(np.repeat(chosen_JNLk, 2, axis=0), experts, config, next_topic=sources)


def _systematic_NLk(counts_LE: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
    """Return the choices of a bank: k different experts per token, as often as their counts (Madow 1949)."""
    chance_LE = counts_LE * (k / counts_LE.sum(axis=1, keepdims=True))
    for _ in range(k):  # a token chooses an expert at most once, so any chance above 1 goes to the others
        over_L1 = (np.maximum(chance_LE, 1) - 1).sum(axis=1, keepdims=True)
        chance_LE = np.minimum(chance_LE, 1)
        rest_LE = np.where(chance_LE < 1, chance_LE, 0)
        chance_LE += over_L1 * rest_LE / np.maximum(rest_LE.sum(axis=1, keepdims=True), 1e-300)
    # A random order for each token, so that neighbouring experts are not correlated.
    order_NLE = np.argsort(rng.random((BANK_TOKENS, *counts_LE.shape), np.float32), axis=2)
    chance_NLE = np.take_along_axis(np.broadcast_to(chance_LE, order_NLE.shape), order_NLE, axis=2)
    # An expert is chosen if the running sum crosses one of u, u + 1, ..., u + k - 1 at it.
    passed_NLE = np.ceil(np.cumsum(chance_NLE, axis=2) - rng.random((BANK_TOKENS, len(counts_LE), 1)))
    passed_NLE[:, :, -1] = k  # exactly k choices, in spite of rounding
    chosen_NLE = np.diff(passed_NLE, axis=2, prepend=0) > 0
    return order_NLE[chosen_NLE].reshape(BANK_TOKENS, len(counts_LE), k)
