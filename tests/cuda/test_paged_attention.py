"""The attention kernel compiled for H100, at the sizes of Qwen3 models."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from gimbal_jax.pallas_kernels import paged_attention
from gimbal_jax.pallas_kernels.paged_attention_mosaic import ROWS, WARPGROUPS
from gimbal_jax.planning.hardware import gpu_kinds
from tests.cuda.harness import compile_for_h100, shape
from tests.pallas_kernels.shapes import KERNEL_ATTENTION, QWEN3_ATTENTION, AttentionShape

SHAPES = KERNEL_ATTENTION | QWEN3_ATTENTION
RESERVED = 1024
"""Bytes of shared memory that CUDA reserves in every block."""
REGISTERS_PER_CORE = 65_536
THREADS = 128
"""Threads of a warpgroup."""


def arguments(sizes: AttentionShape) -> list[jax.ShapeDtypeStruct]:
    pages = shape(jnp.bfloat16, sizes.num_pages, sizes.page_size, sizes.kv_heads, sizes.dim)
    by_group = shape(jnp.int32, sizes.groups)
    q_GQHD = shape(jnp.bfloat16, sizes.groups, sizes.queries, sizes.heads, sizes.dim)
    return [q_GQHD, pages, pages, shape(jnp.int32, sizes.groups, sizes.pages_per_row), by_group, by_group]


def partial_results(sizes: AttentionShape) -> int:
    """Return the most bytes of partial results that XLA merges: float32 rows, and a sum for each row."""
    return WARPGROUPS * ROWS * (sizes.dim + 1) * 4


@pytest.mark.parametrize(
    "name,window", [*((name, None) for name in SHAPES), ("30b_tp2_decode", 4096), ("30b_tp2_prefill", 4096)]
)
def test_compiles_without_spills_and_without_a_copy_of_the_context(name, window):
    compiled = compile_for_h100(partial(paged_attention, window=window, backend="mosaic"), *arguments(SHAPES[name]))
    (kernel,) = compiled.kernels
    print(f"{name}: {kernel}, {compiled.temporary_bytes} temporary bytes")
    assert kernel.name == "paged_attention"
    assert (kernel.stack_bytes, kernel.spill_store_bytes, kernel.spill_load_bytes) == (0, 0, 0)
    assert compiled.temporary_bytes <= 1.1 * partial_results(SHAPES[name])


def test_there_is_no_merge_if_groups_fill_the_gpu():
    compiled = compile_for_h100(
        partial(paged_attention, backend="mosaic"), *arguments(QWEN3_ATTENTION["30b_tp2_prefill"])
    )
    assert compiled.temporary_bytes == 0


def test_two_decode_blocks_fit_on_a_core():
    compiled = compile_for_h100(
        partial(paged_attention, backend="mosaic"), *arguments(QWEN3_ATTENTION["30b_tp2_decode"])
    )
    (kernel,) = compiled.kernels
    assert 2 * (kernel.shared_memory_bytes + RESERVED) <= gpu_kinds()["H100"].shared_memory_per_core
    assert 2 * kernel.registers * THREADS <= REGISTERS_PER_CORE


def test_pages_are_written_in_place_before_they_are_read():
    """The function is a layer of the step with decode rows and prefill tiles."""
    decode, prefill = QWEN3_ATTENTION["30b_tp2_decode"], QWEN3_ATTENTION["30b_tp2_one_tile"]
    q_rows, k_pages, v_pages, *row_tables = arguments(decode)
    q_tiles, _, _, *tile_tables = arguments(prefill)
    tokens = decode.groups + prefill.groups * prefill.queries
    new = shape(jnp.bfloat16, tokens, decode.kv_heads, decode.dim)

    def layer(k_pages, v_pages, k_new, v_new, write, q_rows, q_tiles, *tables):
        k_pages, v_pages = (
            pages.reshape(-1, *pages.shape[2:]).at[write].set(new, mode="drop").reshape(pages.shape)
            for pages, new in ((k_pages, k_new), (v_pages, v_new))
        )
        rows = paged_attention(q_rows, k_pages, v_pages, *tables[:3], backend="mosaic")
        tiles = paged_attention(q_tiles, k_pages, v_pages, *tables[3:], backend="mosaic")
        return rows, tiles, k_pages, v_pages

    donating = jax.jit(layer, donate_argnums=(0, 1))
    write = shape(jnp.int32, tokens)
    tables = *row_tables, *tile_tables
    compiled = compile_for_h100(donating, k_pages, v_pages, new, new, write, q_rows, q_tiles, *tables)
    pages_bytes = 2 * k_pages.size * 2
    memory = compiled.program.memory_analysis()
    assert memory is not None and memory.alias_size_in_bytes == pages_bytes
    assert compiled.temporary_bytes <= 1.1 * partial_results(prefill) < pages_bytes / 10
