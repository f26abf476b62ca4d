"""What is learned of prompts and their experts: against the distances that made the traffic."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.config import MeshConfig
from gimbal_jax.scheduler.affinity import (
    BUCKETS,
    PROMPT_SAMPLE,
    Profile,
    distance_LES,
    learn,
    new_profile,
    prompt_distance_S,
    table_BS,
)
from gimbal_jax.scheduler.dispatch import NEARER
from gimbal_jax.scheduler.distance import distance_SR
from gimbal_jax.scheduler.placement import static_placement

LAYERS, EXPERTS = 4, 16
PAIRS = 16
"""That a token counts as in each layer: with as many layers as a real model has, there is as little noise."""
MESH = MeshConfig(dp=4, tp=1, nodes=2)
TOPICS, WORDS, EVERYWHERE = 5, 40, 60
"""Topic j has the token ids from 1000 j on, so many of them; the first ids are in every text."""


class Traffic:
    """Sources that mix the requests of all topics in their steps; what a token chooses is up to its topic."""

    def __init__(self, seed: int, topicality: float = 1.0) -> None:
        self.rng = np.random.default_rng(seed)
        self.distance_LES = distance_LES(static_placement(LAYERS, EXPERTS, MESH.ranks), distance_SR(MESH, 9.0))
        self.turn_experts(topicality)

    def turn_experts(self, topicality: float = 1.0) -> None:
        """Draw anew what the topics choose."""
        logits_JLE = topicality * self.rng.normal(size=(TOPICS, LAYERS, EXPERTS))
        share_JLE = np.exp(logits_JLE + self.rng.normal(size=(LAYERS, EXPERTS)))
        self.share_JLE = share_JLE / share_JLE.sum(axis=2, keepdims=True)

    def prompt(self, topic: int) -> np.ndarray:
        own = 1000 * topic + self.rng.integers(WORDS, size=self.rng.integers(20, 300))
        return np.concatenate([own, self.rng.integers(EVERYWHERE, size=100)])

    def collect(self, requests: int = 6) -> tuple[np.ndarray, np.ndarray]:
        tokens_SB = np.zeros((MESH.dp, BUCKETS), np.float32)
        counts_LSE = np.zeros((LAYERS, MESH.dp, EXPERTS), np.int64)
        for s in range(MESH.dp):
            for topic in self.rng.integers(TOPICS, size=self.rng.integers(1, 2 * requests)):
                prompt = self.prompt(topic)
                tokens_SB[s] += np.bincount(prompt % BUCKETS, minlength=BUCKETS)
                counts_LSE[:, s] += self.rng.multinomial(PAIRS * len(prompt), self.share_JLE[topic])
        return tokens_SB, counts_LSE

    def learn(self, profile: Profile, collections: int) -> Profile:
        for _ in range(collections):
            profile = learn(profile, *self.collect(), self.distance_LES)
        return profile

    def said_S(self, profile: Profile, topic: int) -> np.ndarray:
        """Of some of the topic's prompts, in the mean."""
        table = table_BS(profile)
        return np.mean([prompt_distance_S(table, tuple(self.prompt(topic))) for _ in range(20)], axis=0)

    def error(self, profile: Profile) -> float:
        """Of what is said of each topic's prompts, as a share of how much they differ."""
        true_JS = np.einsum("jle,les->js", self.share_JLE, self.distance_LES) / LAYERS
        true_JS = (true_JS - true_JS.mean(axis=0)) / true_JS.mean()
        said_JS = np.array([self.said_S(profile, topic) for topic in range(TOPICS)])
        said_JS -= said_JS.mean(axis=0)
        return float(np.linalg.norm(said_JS - true_JS) / np.linalg.norm(true_JS))


@pytest.mark.parametrize("seed", range(2))
def test_topics_are_told_apart_although_every_source_mixes_them(seed):
    traffic = Traffic(seed)
    early = traffic.learn(new_profile(MESH.dp), 5)
    late = traffic.learn(early, 100)
    assert traffic.error(late) < 0.4 < 0.5 < traffic.error(early) <= 1.0


@pytest.mark.parametrize("seed", range(2))
def test_what_no_longer_holds_is_forgotten(seed):
    traffic = Traffic(seed)
    learned = traffic.learn(new_profile(MESH.dp), 100)
    traffic.turn_experts()
    before = traffic.error(learned)
    assert traffic.error(traffic.learn(learned, 150)) < 0.4 < 0.55 < before


@pytest.mark.parametrize("seed", range(2))
def test_where_topics_route_alike_prompts_are_equally_far_from_every_source(seed):
    traffic = Traffic(seed, topicality=0.0)
    profile = traffic.learn(new_profile(MESH.dp), 200)
    assert max(np.abs(traffic.said_S(profile, topic)).max() for topic in range(TOPICS)) < NEARER / 2


def test_the_table_says_nothing_of_what_never_occurred():
    profile = Traffic(0).learn(new_profile(MESH.dp), 30)
    table = table_BS(profile)
    assert table.shape == (BUCKETS, MESH.dp) and table.dtype == np.float32
    never_B = profile.share_B == 0
    assert never_B.sum() == BUCKETS - EVERYWHERE - TOPICS * WORDS + WORDS  # topic 0 begins with the first ids too
    assert not table[never_B].any() and table[~never_B].all()


def test_a_profile_that_explains_nothing_says_nothing():
    profile = Traffic(0).learn(new_profile(MESH.dp), 30)
    assert not table_BS(replace(profile, missed=profile.spread)).any()
    assert not table_BS(replace(profile, missed=2 * profile.spread)).any()
    half, full = (table_BS(replace(profile, missed=missed * profile.spread)) for missed in (0.5, 0.0))
    assert half.any() and np.allclose(2 * half, full)


def test_names_of_sources_do_not_matter():
    """Traffic and distances in another order give the table in that order."""
    traffic, order = Traffic(1), np.array([2, 0, 3, 1])
    one = other = new_profile(MESH.dp)
    for _ in range(20):
        tokens_SB, counts_LSE = traffic.collect()
        one = learn(one, tokens_SB, counts_LSE, traffic.distance_LES)
        other = learn(other, tokens_SB[order], counts_LSE[:, order], traffic.distance_LES[:, :, order])
    assert np.allclose(table_BS(one)[:, order], table_BS(other), atol=1e-5)


def test_sources_without_traffic_teach_nothing():
    traffic = Traffic(2)
    profile = traffic.learn(new_profile(MESH.dp), 10)
    tokens_SB, counts_LSE = traffic.collect()
    counts_LSE[:, 1] = tokens_SB[1] = 0
    some = learn(profile, tokens_SB, counts_LSE, traffic.distance_LES)
    assert np.isfinite(table_BS(some)).all() and some.collections == 11
    nothing = learn(profile, np.zeros_like(tokens_SB), np.zeros_like(counts_LSE), traffic.distance_LES)
    assert nothing is profile


def test_after_moves_the_mean_distance_is_known_at_once():
    traffic = Traffic(3)
    profile = traffic.learn(new_profile(MESH.dp), 50)
    traffic.distance_LES = traffic.distance_LES * 3
    tokens_SB, counts_LSE = traffic.collect()
    now_S = np.einsum("lse,let->t", counts_LSE, traffic.distance_LES) / counts_LSE.sum()
    assert np.allclose(learn(profile, tokens_SB, counts_LSE, traffic.distance_LES, moved=True).mean_S, now_S)
    assert not np.allclose(learn(profile, tokens_SB, counts_LSE, traffic.distance_LES).mean_S, now_S, rtol=0.3)


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=50))
def test_a_prompt_is_at_the_mean_of_its_tokens(prompt):
    table = np.random.default_rng(0).normal(size=(BUCKETS, 3)).astype(np.float32)
    naive_S = np.mean([table[token % BUCKETS] for token in prompt], axis=0)
    assert np.allclose(prompt_distance_S(table, tuple(prompt)), naive_S, atol=1e-5)


def test_long_prompts_are_sampled_from_beginning_to_end():
    table = np.zeros((BUCKETS, 2), np.float32)
    table[1] = 1.0, -1.0
    half = 10 * PROMPT_SAMPLE
    assert np.allclose(prompt_distance_S(table, (0,) * half + (1,) * half), (0.5, -0.5), atol=1e-3)
    assert prompt_distance_S(None, (0,)) == ()


@pytest.mark.parametrize("dp, tp, nodes", [(2, 1, 2), (2, 2, 1), (4, 1, 2)])
def test_distances_of_experts_are_those_of_their_ranks(dp, tp, nodes):
    mesh = MeshConfig(dp, tp, nodes)
    slots_LE = np.stack([np.random.default_rng(layer).permutation(EXPERTS) for layer in range(LAYERS)])
    found, by_rank = distance_LES(slots_LE, distance_SR(mesh, 9.0)), distance_SR(mesh, 9.0)
    for layer, expert, source in np.ndindex(LAYERS, EXPERTS, dp):
        rank = slots_LE[layer, expert] // (EXPERTS // mesh.ranks)
        assert found[layer, expert, source] == pytest.approx(by_rank[source, rank])
