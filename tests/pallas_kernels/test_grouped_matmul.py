"""The grouped feed-forward equals its dense reference, in all forms."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from gimbal_jax.pallas_kernels import Backend, grouped_ffn, grouped_ffn_reference, grouped_matmul
from tests.pallas_kernels.shapes import GROUPED, GroupedShape

reference = jax.jit(grouped_ffn_reference)
Operands = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


FORMS: dict[str, tuple[Backend, int, dict[str, float], Any]] = {
    "xla, many ranks": ("xla", 16, {"FEW_SLOTS": 0}, np.float32),  # slots have more rows than average
    "xla, alone": ("xla", 1, {"FEW_SLOTS": 0}, np.float32),
    "xla, bfloat16 weights": ("xla", 2, {"FEW_SLOTS": 0}, bfloat16),
    "xla, few tokens": ("xla", 1, {"FEW_SLOTS": np.inf}, np.float32),
    "xla, few tokens, bfloat16 weights": ("xla", 1, {"FEW_SLOTS": np.inf}, bfloat16),
    "interpret": ("interpret", 16, {}, np.float32),
    "interpret in chunks": ("interpret", 16, {"ALWAYS_ONE_CHUNK": 16}, np.float32),
}


FAST = ("xla, many ranks", "xla, few tokens")
SLOW = (pytest.param(form, marks=pytest.mark.slow) for form in FORMS if form not in FAST)


@pytest.fixture(scope="module", params=[*FAST, *SLOW])
def ffn(request):
    backend, ranks, constants, weights_type = FORMS[request.param]

    def by_slot(x_ND, slot_Nk, weight_Nk, *weights):
        place_Nk, size_P = places(slot_Nk, len(weights[0]))
        return np.asarray(run(x_ND, place_Nk, weight_Nk, size_P, *(array.astype(weights_type) for array in weights)))

    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(grouped_matmul, name, value)
        run = jax.jit(partial(grouped_ffn, backend=backend, ranks=ranks))
        yield by_slot


def places(slot_Nk: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each pair's place among all pairs sorted by slot, -1 without a slot, and the pairs of each slot."""
    slot_n = slot_Nk.reshape(-1)
    order_n = np.argsort(np.where(slot_n >= 0, slot_n, slots), kind="stable")
    place_n = np.full(slot_n.shape, -1, np.int32)
    size_P = np.bincount(slot_n[slot_n >= 0], minlength=slots).astype(np.int32)
    place_n[order_n[: size_P.sum()]] = np.arange(size_P.sum())
    return place_n.reshape(slot_Nk.shape), size_P


def operands(shape: GroupedShape, rng: np.random.Generator, favourite: int | None = None) -> Operands:
    """Return normal tokens, weights that are exact in bfloat16, and k slots per token, ``favourite`` first."""
    slots = [rng.permutation(shape.slots) for _ in range(shape.tokens)]
    if favourite is not None:
        slots = [np.array([favourite, *order[order != favourite]]) for order in slots]
    return (
        rng.normal(size=(shape.tokens, shape.hidden)).astype(np.float32),
        np.array([order[: shape.k] for order in slots], np.int32),
        rng.random((shape.tokens, shape.k)).astype(np.float32) + 0.1,
        kept(rng.normal(size=(shape.slots, shape.hidden, 2 * shape.intermediate))),
        kept(rng.normal(size=(shape.slots, shape.intermediate, shape.hidden))),
    )


def kept(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(bfloat16).astype(np.float32)


def assert_same(got: jax.Array, want: np.ndarray | jax.Array) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_reference_is_the_formula():
    """The reference equals a loop in float64."""
    x_ND, slot_Nk, weight_Nk, gate_up_PDF, down_PFD = operands(GROUPED["decode"], np.random.default_rng(0))
    slot_Nk[3], slot_Nk[5, 0] = -1, -1
    want_ND = np.zeros(x_ND.shape)
    for n, k in np.argwhere(slot_Nk >= 0):
        gate, up = np.split(x_ND[n].astype(np.float64) @ gate_up_PDF[slot_Nk[n, k]], 2)
        want_ND[n] += weight_Nk[n, k] * (gate / (1 + np.exp(-gate)) * up) @ down_PFD[slot_Nk[n, k]]
    place_Nk, size_P = places(slot_Nk, len(gate_up_PDF))
    assert_same(reference(x_ND, place_Nk, weight_Nk, size_P, gate_up_PDF, down_PFD), want_ND)


@given(
    st.sampled_from(sorted(GROUPED)),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    st.sampled_from(["spread", "crowded"]),
)
@settings(max_examples=40)
def test_equals_the_reference(ffn, name, seed, absent, load):
    """Cases have any share of pairs without a slot, from none to all, and all tokens in one slot."""
    shape, rng = GROUPED[name], np.random.default_rng(seed)
    favourite = shape.slots - 1 if load == "crowded" else None
    x_ND, slot_Nk, weight_Nk, *weights = operands(shape, rng, favourite)
    slot_Nk[rng.random(slot_Nk.shape) < absent] = -1
    place_Nk, size_P = places(slot_Nk, shape.slots)
    got = ffn(x_ND, slot_Nk, weight_Nk, *weights)
    assert_same(got, reference(x_ND, place_Nk, weight_Nk, size_P, *weights))
    assert not got[(slot_Nk < 0).all(axis=1)].any()


@pytest.mark.parametrize("empty", ["half", "first"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", sorted(GROUPED))
def test_rows_without_slots_do_not_leak(ffn, name, bad, empty):
    shape, rng = GROUPED[name], np.random.default_rng(1)
    x_ND, slot_Nk, weight_Nk, *weights = operands(shape, rng)
    empty_N = rng.random(shape.tokens) < (0.5 if empty == "half" else 0)
    empty_N[0] = True
    slot_Nk[empty_N] = -1
    want = ffn(x_ND, slot_Nk, weight_Nk, *weights)
    x_ND[empty_N], weight_Nk[empty_N] = bad, bad
    np.testing.assert_array_equal(ffn(x_ND, slot_Nk, weight_Nk, *weights), want)


def test_slots_without_tokens_do_not_leak(ffn):
    """Weights of slots that no token chose may be NaN."""
    shape = GROUPED["decode"]
    x_ND, slot_Nk, weight_Nk, gate_up_PDF, down_PFD = operands(shape, np.random.default_rng(2))
    slot_Nk[slot_Nk >= shape.slots // 2] = -1
    want = ffn(x_ND, slot_Nk, weight_Nk, gate_up_PDF, down_PFD)
    gate_up_PDF[shape.slots // 2 :], down_PFD[shape.slots // 2 :] = np.nan, np.nan
    np.testing.assert_array_equal(ffn(x_ND, slot_Nk, weight_Nk, gate_up_PDF, down_PFD), want)


def test_nan_in_one_token_reaches_no_other_token(ffn):
    x_ND, slot_Nk, *rest = operands(GROUPED["prefill"], np.random.default_rng(3))
    want = ffn(x_ND, slot_Nk, *rest).copy()
    x_ND[7] = want[7] = np.nan
    np.testing.assert_array_equal(ffn(x_ND, slot_Nk, *rest), want)


@pytest.mark.parametrize("tokens", [1, 256, 1024, 16384])
@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_chunks_hold_the_average_load_and_no_more_than_the_worst(tokens, ranks):
    k, slots = 8, 128 // ranks
    rows = grouped_matmul.chunk_rows(tokens, k, slots, ranks)
    assert tokens * k / ranks <= rows <= tokens * min(k, slots)
    assert rows <= max(8192, 1.25 * tokens * k / ranks + 1)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 3, 32, 500])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("weights_type", [np.float32, bfloat16])
def test_the_xla_form_takes_no_more_memory_than_stated(tokens, ranks, weights_type):
    k, slots, hidden, intermediate = 4, 16 // ranks, 1024, 512
    shapes = ((tokens, hidden), float), ((tokens, k), int), ((tokens, k), float), ((slots,), int)
    weights = ((slots, hidden, 2 * intermediate), "weights"), ((slots, intermediate, hidden), "weights")
    types = {int: np.int32, float: np.float32, "weights": weights_type}
    arrays = [jax.ShapeDtypeStruct(shape, types[kind]) for shape, kind in (*shapes, *weights)]
    compiled = jax.jit(partial(grouped_ffn, ranks=ranks)).lower(*arrays).compile()
    item = np.dtype(weights_type).itemsize
    stated = grouped_matmul.slots_bytes(tokens, k, slots, hidden, intermediate, ranks, 4, item)
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes <= stated


@pytest.mark.parametrize("tokens", [1, 32, 544])
@pytest.mark.parametrize("ranks", [1, 4])
def test_slots_have_room_for_the_average_load_and_no_more_than_all_tokens(tokens, ranks):
    k, slots = 4, 32 // ranks
    rows = grouped_matmul.slot_rows(tokens, k, slots, ranks)
    assert tokens * k / (slots * ranks) <= rows < tokens + grouped_matmul.TILE
    assert rows < 1.25 * tokens * k / (slots * ranks) + grouped_matmul.TILE
