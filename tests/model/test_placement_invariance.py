"""The placement of experts changes neither the logits, which clients see, nor the counts, which the scheduler sees."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.rig import Chunk, Rig, rig

GOLDEN = Path(__file__).parents[1] / "goldens" / "sparse_step"
"""A checkpoint whose first layer is dense, and whose MoE layers alternate with dense ones."""
TOKENS = np.random.default_rng(0).integers(0, 128, 40)
SECOND_SEQUENCE = 12
MAX_ERROR = 1e-5


def run_all_kinds(model: Rig) -> list[np.ndarray]:
    """Return the logits of prefill, mixed and decode steps on both engines; each engine idles once."""
    first, second = TOKENS[:17], TOKENS[17:37]
    steps: list[list[tuple[list[Chunk], list[Chunk]]]] = [
        [([], [Chunk(first, 0)]), ([], [])],
        [([Chunk(TOKENS[37:38], 17)], [Chunk(second[:9], 0, SECOND_SEQUENCE)]), ([], [Chunk(first, 0)])],
        [([Chunk(TOKENS[38:39], 18)], [Chunk(second[9:], 9, SECOND_SEQUENCE)]), ([Chunk(TOKENS[37:38], 17)], [])],
        [([Chunk(TOKENS[39:], 19), Chunk(TOKENS[:1], 20, SECOND_SEQUENCE)], []), ([Chunk(TOKENS[38:39], 18)], [])],
        [([], []), ([Chunk(TOKENS[39:], 19)], [])],
    ]
    return [logits for step in steps for engine in model.run(*step) for logits in engine]


@pytest.fixture(scope="module", params=["gather", pytest.param("sparse", marks=pytest.mark.slow)])
def contiguous(request) -> tuple[Rig, list[np.ndarray], np.ndarray]:
    """A model under the contiguous placement, its logits and its counts."""
    model = rig(GOLDEN, 2, 2, request.param)
    logits = run_all_kinds(model)
    return model, logits, model.counts_LSE()


@st.composite
def placements(draw: st.DrawFn) -> np.ndarray:
    return np.array([draw(st.permutations(range(8))) for _ in range(2)], np.int32)


@given(placements())
@settings(max_examples=12)
def test_any_placement_gives_the_same_logits_and_counts(contiguous, slot_of_expert_LE):
    model, logits, counts_LSE = contiguous
    other = model.placed(slot_of_expert_LE)
    for got, want in zip(run_all_kinds(other), logits, strict=True):
        np.testing.assert_allclose(got, want, atol=MAX_ERROR, rtol=0)
    np.testing.assert_array_equal(other.counts_LSE(), counts_LSE)


def test_weights_in_another_order_than_the_placement_change_the_logits(contiguous):
    """The test above would detect a path that ignores the map from expert to slot."""
    model, logits, _ = contiguous
    swapped = np.tile(np.array([7, 1, 2, 3, 4, 5, 6, 0], np.int32), (2, 1))
    wrong = model.placed(swapped)
    wrong.slot_of_expert_LE = model.slot_of_expert_LE
    assert max(np.abs(a - b).max() for a, b in zip(run_all_kinds(wrong), logits, strict=True)) > 100 * MAX_ERROR
