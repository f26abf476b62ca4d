"""Paged attention equals dense attention in float64."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gimbal_jax.pallas_kernels import paged_attention
from gimbal_jax.pallas_kernels.paged_attention import paged_attention_reference
from tests.pallas_kernels.attention_arrays import attention_arrays, seen_context
from tests.pallas_kernels.shapes import ATTENTION, AttentionShape

attend = jax.jit(paged_attention, static_argnames="window")
reference = jax.jit(paged_attention_reference, static_argnames="window")
DECODE, PREFILL, SHARED = ATTENTION["decode"], ATTENTION["prefill"], ATTENTION["heads_in_threes"]
WINDOWS = [None, 20, pytest.param(1, marks=pytest.mark.slow)]


def dense(q_QHD: np.ndarray, k_CKD: np.ndarray, v_CKD: np.ndarray, start: int, window: int | None) -> np.ndarray:
    """Attend densely from the tokens of one sequence, from position ``start`` on, to these keys and values."""
    share = q_QHD.shape[1] // k_CKD.shape[1]
    k_CHD, v_CHD = (np.repeat(a.astype(np.float64), share, axis=1) for a in (k_CKD, v_CKD))
    score_HQC = np.einsum("qhd,chd->hqc", q_QHD.astype(np.float64), k_CHD) / q_QHD.shape[2] ** 0.5
    position_Q1, context_C = start + np.arange(len(q_QHD))[:, None], np.arange(len(k_CHD))
    seen_QC = context_C <= position_Q1
    if window is not None:
        seen_QC &= context_C > position_Q1 - window
    share_HQC = np.where(seen_QC, np.exp(score_HQC - score_HQC.max(axis=-1, keepdims=True)), 0)
    return np.einsum("hqc,chd->qhd", share_HQC / share_HQC.sum(axis=-1, keepdims=True), v_CHD)


def check(shape: AttentionShape, start_G: list[int], count_G: list[int], window: int | None, seed: int) -> None:
    """Attend over scattered pages, with NaN in all places that no group sees, and compare group by group."""
    arrays = attention_arrays(shape, start_G, count_G, window, seed, np.float32)
    want_GQHD = np.zeros(arrays.q_GQHD.shape)
    for g, (start, count) in enumerate(zip(start_G, count_G, strict=True)):
        begin, end = seen_context(start, count, window)
        k_CKD, v_CKD = (
            pages[arrays.page_table_GM[g]].reshape(-1, *pages.shape[2:])[begin:end]
            for pages in (arrays.k_pages, arrays.v_pages)
        )
        if count:
            want_GQHD[g, :count] = dense(arrays.q_GQHD[g, :count], k_CKD, v_CKD, start - begin, window)
    for form in (attend, reference):
        np.testing.assert_allclose(form(*arrays, window=window), want_GQHD, atol=2e-6, rtol=0)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    "lengths", [[1, 7, 8, 9, 0, 16], [127, 128, 129, 256, 257, 320], [320, 1, 0, 0, 0, 0], [0] * 6], ids=str
)
def test_decode_at_the_edges_of_pages_and_blocks(lengths, window):
    check(DECODE, [max(n - 1, 0) for n in lengths], [int(n > 0) for n in lengths], window, seed=0)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    "start,count",
    [([0, 0, 0], [16, 1, 0]), ([7, 8, 9], [16, 9, 15]), ([112, 120, 128], [16, 16, 16]), ([300, 5, 255], [16, 3, 2])],
    ids=str,
)
def test_prefill_tiles_at_the_edges_of_pages_and_blocks(start, count, window):
    check(PREFILL, start, count, window, seed=0)


@pytest.mark.parametrize("start,count", [([0, 159], [1, 1]), ([160, 479], [1, 1]), ([319, 0], [1, 0])], ids=str)
def test_pages_larger_than_a_block(start, count):
    check(ATTENTION["pages_larger_than_a_block"], start, count, None, seed=0)


@pytest.mark.parametrize("start,count", [([0, 121], [4, 4]), ([124, 125], [4, 1]), ([296, 249], [4, 3])], ids=str)
def test_pages_that_do_not_divide_a_block(start, count):
    check(ATTENTION["pages_that_do_not_divide_a_block"], start, count, None, seed=0)


@st.composite
def tiles(draw: st.DrawFn, shape: AttentionShape) -> tuple[list[int], list[int]]:
    count_G = [draw(st.integers(0, shape.queries)) for _ in range(shape.groups)]
    most = shape.page_size * shape.pages_per_row
    return [draw(st.integers(0, most - count)) for count in count_G], count_G


@pytest.mark.slow
@pytest.mark.parametrize("shape", [DECODE, PREFILL, SHARED], ids=["decode", "prefill", "shared"])
@given(st.data(), st.sampled_from([None, 1, 20]), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_random_tiles_equal_dense_attention(shape, data, window, seed):
    start_G, count_G = data.draw(tiles(shape))
    check(shape, start_G, count_G, window, seed)


def test_two_groups_may_share_pages():
    """Tiles of one prompt read the same pages, and each tile sees only its own past."""
    rng = np.random.default_rng(0)
    k_CKD, v_CKD = rng.normal(size=(2, 48, PREFILL.kv_heads, PREFILL.dim)).astype(np.float32)
    k_pages, v_pages = np.full(
        (2, PREFILL.num_pages, PREFILL.page_size, PREFILL.kv_heads, PREFILL.dim), np.nan, np.float32
    )
    k_pages[10:16], v_pages[10:16] = (a.reshape(6, 8, *a.shape[1:]) for a in (k_CKD, v_CKD))
    table_GM = np.zeros((3, PREFILL.pages_per_row), np.int32)
    table_GM[:, :6] = np.arange(10, 16)
    q_GQHD = rng.normal(size=(3, 16, PREFILL.heads, PREFILL.dim)).astype(np.float32)
    start_G = np.arange(0, 48, 16, dtype=np.int32)
    got = attend(q_GQHD, k_pages, v_pages, table_GM, start_G, np.full(3, 16, np.int32))
    want = dense(q_GQHD.reshape(48, PREFILL.heads, PREFILL.dim), k_CKD, v_CKD, 0, None)
    np.testing.assert_allclose(np.asarray(got).reshape(want.shape), want, atol=2e-6, rtol=0)
