"""Random traffic windows and placements for the tests of the scheduler."""

import numpy as np
from hypothesis import strategies as st

from gimbal_jax.config import MeshConfig
from gimbal_jax.scheduler.placement import static_placement


def skewed_counts(rng: np.random.Generator, layers: int, sources: int, experts: int, tokens: int) -> np.ndarray:
    """counts_LSE with hot experts that differ by layer and, half as strongly, by source."""
    logits_LSE = rng.normal(size=(layers, 1, experts)) + 0.5 * rng.normal(size=(layers, sources, experts))
    share_LSE = np.exp(logits_LSE)
    return rng.multinomial(tokens, share_LSE / share_LSE.sum(axis=-1, keepdims=True))


def random_placement(rng: np.random.Generator, layers: int, experts: int) -> np.ndarray:
    return rng.permuted(static_placement(layers, experts, 1), axis=1)


def mesh_of(counts_LSE: np.ndarray, ranks: int, nodes: int = 1) -> MeshConfig:
    sources = counts_LSE.shape[1]
    return MeshConfig(sources, ranks // sources, nodes)


def one_node_SR(counts_LSE: np.ndarray, ranks: int) -> np.ndarray:
    """Distances on one node: 0 for a source's own ranks, 1 for all others."""
    sources = counts_LSE.shape[1]
    return 1 - np.kron(np.eye(sources), np.ones(ranks // sources))


def any_SR(counts_LSE: np.ndarray, ranks: int, seed: int) -> np.ndarray:
    """Distances without any order, but for 0 for a source's own ranks."""
    near_SR = one_node_SR(counts_LSE, ranks)
    return near_SR * np.random.default_rng(seed).uniform(0.1, 9, near_SR.shape)


@st.composite
def traffic(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """(counts_LSE, slot_of_expert_LE, ranks), often with few tokens, so that loads tie and experts idle."""
    sources, tp, slots = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    layers, tokens = draw(st.integers(1, 3)), draw(st.sampled_from([0, 1, 5, 50, 5000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    experts = sources * tp * slots
    counts_LSE = skewed_counts(rng, layers, sources, experts, tokens)
    counts_LSE[rng.random(layers) < 0.1] = 0
    return counts_LSE, random_placement(rng, layers, experts), sources * tp
