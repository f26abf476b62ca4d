"""Counts A[l, s, e] are exact: each real token counts k times per MoE layer for its own source; padding does not."""

import inspect
from pathlib import Path

import jax
import numpy as np
import pytest

from gimbal_jax.model import transformer
from gimbal_jax.pallas_kernels import route_and_count
from tests.model.rig import Chunk, Rig, rig

pytestmark = pytest.mark.slow
GOLDENS = Path(__file__).parents[1] / "goldens"
TOKENS = np.random.default_rng(0).integers(0, 128, 40)
SOURCES, LAYERS, TOP_K = 2, 3, 2

Work = tuple[list[Chunk], list[Chunk]]
# Chunks per engine; 40 places and two rows each, so most of the batch is padding.
LEFT: Work = ([], [Chunk(TOKENS[:13], 0)])
RIGHT: Work = ([Chunk(TOKENS[:1], 0, 12)], [Chunk(TOKENS[20:29], 0)])
IDLE: Work = ([], [])


@pytest.fixture(scope="module")
def routed() -> tuple[Rig, list[tuple[int, int, np.ndarray, np.ndarray]]]:
    """A model, and the router inputs of its last step: (layer, source, logits_TE, valid_T) of each call, unordered."""
    seen: list[tuple[int, int, np.ndarray, np.ndarray]] = []
    real, layer = route_and_count, iter(range(LAYERS))

    def recorded(logits_TE, valid_T, slot_of_expert_E, **settings):
        def record(l, s, logits, valid):
            seen.append((int(l), int(s), np.array(logits), np.array(valid)))

        jax.debug.callback(record, next(layer), jax.lax.axis_index("dp"), logits_TE, valid_T)
        return real(logits_TE, valid_T, slot_of_expert_E, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer, "_run_layer", inspect.unwrap(transformer._run_layer))  # traces each layer
        patch.setattr(transformer, "route_and_count", recorded)
        model = rig(GOLDENS / "base", SOURCES, 2)
        model.run(IDLE, IDLE)  # traces
    return model, seen


def counts_of(routed, *engines) -> np.ndarray:
    """Return the counts of one step of a fresh model; ``routed`` then has the inputs of its routers."""
    model, seen = routed
    fresh = model.placed(model.slot_of_expert_LE)
    jax.effects_barrier()
    seen.clear()
    fresh.run(*engines)
    jax.effects_barrier()
    return fresh.counts_LSE()


@pytest.mark.parametrize("engines", [(LEFT, RIGHT), (RIGHT, LEFT), (IDLE, RIGHT), (LEFT, IDLE), (IDLE, IDLE)])
def test_counts_equal_a_recount_of_the_router_logits(routed, engines):
    counts_LSE = counts_of(routed, *engines)
    recount_LSE = np.zeros_like(counts_LSE)
    for l, s, logits_TE, valid_T in routed[1]:
        for logits_E in logits_TE[valid_T]:
            recount_LSE[l, s, np.argsort(-logits_E, kind="stable")[:TOP_K]] += 1
    np.testing.assert_array_equal(counts_LSE, recount_LSE)
    tokens_S = [sum(len(chunk.tokens) for part in engine for chunk in part) for engine in engines]
    np.testing.assert_array_equal(counts_LSE.sum(axis=2), np.tile(np.array(tokens_S) * TOP_K, (LAYERS, 1)))


def test_counts_of_a_source_do_not_depend_on_other_sources(routed):
    together_LSE = counts_of(routed, LEFT, RIGHT)
    np.testing.assert_array_equal(counts_of(routed, LEFT, IDLE)[:, 0], together_LSE[:, 0])
    np.testing.assert_array_equal(counts_of(routed, IDLE, RIGHT)[:, 1], together_LSE[:, 1])


def test_counts_add_up_over_steps(routed):
    once_LSE = counts_of(routed, LEFT, RIGHT)
    model = routed[0].placed(routed[0].slot_of_expert_LE)
    for _ in range(3):
        model.run(LEFT, RIGHT)
    np.testing.assert_array_equal(model.counts_LSE(), 3 * once_LSE)
