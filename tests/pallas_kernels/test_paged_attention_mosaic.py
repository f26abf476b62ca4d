"""The attention kernel, interpreted on the CPU, equals its XLA reference.

The interpreter checks neither memory layouts nor wgmma. The tests in tests/cuda compile them.
"""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from gimbal_jax.pallas_kernels import paged_attention
from gimbal_jax.pallas_kernels.paged_attention import paged_attention_reference
from gimbal_jax.pallas_kernels.paged_attention_mosaic import (
    ROWS,
    STEP,
    WARPGROUPS,
    Cut,
    attend_pages,
    cut,
    merge,
    mosaic_limits,
    seen_by,
    steps_of,
)
from tests.pallas_kernels.attention_arrays import attention_arrays, seen_context
from tests.pallas_kernels.shapes import KERNEL_ATTENTION

reference = jax.jit(paged_attention_reference, static_argnames="window")


def check(
    name: str,
    start_G: list[int],
    count_G: list[int],
    *,
    splits: int,
    window: int | None = None,
    detect_races: bool = False,
) -> None:
    """Compare each query of each head with the float32 reference on equal bfloat16 arrays."""
    arrays = attention_arrays(KERNEL_ATTENTION[name], start_G, count_G, window, 0, ml_dtypes.bfloat16)
    interpret = plgpu.InterpretGPUParams(detect_races=detect_races)
    kernel = jax.jit(partial(attend_pages, window=window, interpret=interpret, splits=splits))
    got = np.asarray(kernel(*arrays), np.float32)
    want = np.asarray(reference(*(a.astype(np.float32) for a in arrays[:3]), *arrays[3:], window=window))
    error, scale = np.linalg.norm(got - want, axis=-1), np.linalg.norm(want, axis=-1)
    # Weights and results are rounded to bfloat16, by at most 1 / 256 each. If the reference is 0, so is the kernel.
    np.testing.assert_array_less(error, scale / 128 + 1e-9)


def decode(lengths: list[int]) -> tuple[list[int], list[int]]:
    """Return start and count of groups with the last token of sequences of these lengths; empty for length 0."""
    return [max(n - 1, 0) for n in lengths], [int(n > 0) for n in lengths]


@pytest.mark.slow
@pytest.mark.parametrize("page_size,splits", [(8, 1), (16, 3), (32, 1), (64, 3), (128, 1)])
def test_decode_at_the_edges_of_pages(page_size, splits):
    """The last step of some cases reaches past the end of the page table."""
    whole_table = KERNEL_ATTENTION[f"pages_of_{page_size}"].pages_per_row * page_size
    lengths = [1, page_size - 1, page_size, page_size + 1, 0, whole_table]
    check(f"pages_of_{page_size}", *decode(lengths), splits=splits)


@pytest.mark.parametrize("window,splits", [(70, 2), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_window(window, splits):
    check("pages_of_32", *decode([1, 64, 65, 100, 0, 224]), splits=splits, window=window)


TILES = [
    ("tiles_of_8", [60, 0, 120], [8, 0, 3], 30, 2),
    ("tiles_of_32", [0, 200], [32, 19], None, 1),
    ("tiles_of_32", [50, 224], [3, 32], 100, 2),
    ("heads_in_sevens", [60, 0, 248], [8, 5, 8], None, 1),
]


@pytest.mark.parametrize(
    "name,start,count,window,splits",
    [
        ("tiles_of_8", [0, 57, 200], [8, 7, 8], None, 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in TILES),
    ],
    ids=str,
)
def test_tiles(name, start, count, window, splits):
    """A tile of 8 fills the rows of one warpgroup. A tile of 32 takes two blocks of two warpgroups."""
    check(name, start, count, window=window, splits=splits)


@pytest.mark.slow
def test_32k_of_context():
    check("long", *decode([32_768]), splits=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,start,count,window,splits",
    [("pages_of_16", [100, 230, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], 90, 2), ("tiles_of_32", [220, 0], [32, 0], None, 1)],
    ids=["decode", "prefill"],
)
def test_the_kernel_has_no_races(name, start, count, window, splits):
    """Each stage of shared memory is used more than once, and values are cleared."""
    check(name, start, count, window=window, splits=splits, detect_races=True)


@pytest.mark.slow
def test_public_operation_runs_the_kernel():
    shape = KERNEL_ATTENTION["pages_of_64"]
    arrays = attention_arrays(shape, *decode([3, 0, 70, 0, 0, 300]), None, 1, ml_dtypes.bfloat16)
    got, want = (jax.jit(partial(paged_attention, backend=b))(*arrays) for b in ("interpret", "xla"))
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), atol=0.03, rtol=0)
    assert (got != want).any(), "these are two forms: they round differently"


def test_merge_ignores_parts_without_visible_tokens():
    out_SXD = jnp.array([[[1.0, 2.0], [5.0, 5.0]], [[9.0, 9.0], [7.0, 7.0]], [[3.0, 4.0], [8.0, 8.0]]])
    log_sum_SX = jnp.array([[3.0, -np.inf], [-np.inf, -np.inf], [1.0, -np.inf]])
    want_XD = np.array([[(4 * 1 + 3) / 5, (4 * 2 + 4) / 5], [0.0, 0.0]])
    np.testing.assert_allclose(merge(out_SXD, log_sum_SX), want_XD, rtol=1e-6)


@pytest.mark.parametrize(
    "call,expected",
    [
        (dict(groups=128, queries=1, kv_heads=2, heads_per_kv_head=8), Cut(1, 1, 1, splits=1)),
        (dict(groups=32, queries=1, kv_heads=2, heads_per_kv_head=8), Cut(1, 1, 1, splits=4)),
        (dict(groups=1, queries=1, kv_heads=2, heads_per_kv_head=8), Cut(1, 1, 1, splits=132)),
        (dict(groups=64, queries=128, kv_heads=2, heads_per_kv_head=8), Cut(8, 2, 8, splits=1)),
        (dict(groups=1, queries=128, kv_heads=1, heads_per_kv_head=8), Cut(8, 2, 8, splits=16)),
        (dict(groups=1, queries=12, kv_heads=1, heads_per_kv_head=7), Cut(6, 2, 1, splits=132)),
    ],
    ids=str,
)
def test_cut_by_hand(call, expected):
    assert cut(**call, context=32_768) == expected


@given(st.integers(1, 300), st.integers(1, 128), st.integers(1, 8), st.integers(1, 64), st.integers(1, 10**6))
def test_cut_covers_all_queries_and_does_not_overfill_the_gpu(groups, queries, kv_heads, share, context):
    c = cut(groups, queries, kv_heads, share, context)
    assert c.queries * c.warpgroups * c.blocks == queries
    assert c.queries * share <= ROWS
    assert c.splits == 1 or groups * kv_heads * c.blocks * c.warpgroups * c.splits <= WARPGROUPS


@given(
    st.integers(0, 10**6),
    st.integers(0, 128),
    st.one_of(st.none(), st.integers(1, 10**5)),
    st.integers(1, 12),
)
@settings(max_examples=50)
def test_splits_cover_the_visible_steps_exactly(start, count, window, splits):
    begin, end = (int(x) for x in seen_by(start, count, window))
    assert (begin, end) == seen_context(start, count, window)
    shares = [steps_of(begin, end, split, splits) for split in range(splits)]
    taken = [step for first, steps in shares for step in range(int(first), int(first + steps))]
    assert taken == ([] if count == 0 else list(range(begin // STEP, (end - 1) // STEP + 1)))
    assert max(int(steps) for _, steps in shares) == -(-len(taken) // splits)


def test_limits_name_what_is_allowed():
    assert mosaic_limits(jnp.bfloat16, 128, 64, 8) == []
    assert mosaic_limits(np.float32, 80, 48, 71) == [
        "dtype is float32; the attention kernel takes bfloat16",
        "head_dim is 80; the attention kernel takes one of (64, 128)",
        "page_size is 48; the attention kernel takes one of (8, 16, 32, 64, 128)",
        "71 query heads share a KV head; the attention kernel takes at most 64",
    ]


def test_arrays_beyond_the_limits_are_rejected():
    arrays = attention_arrays(KERNEL_ATTENTION["tiles_of_8"], [0] * 3, [1] * 3, None, 0, np.float32)
    with pytest.raises(ValueError, match="dtype is float32"):
        paged_attention(*arrays, backend="interpret")
