"""Causal attention of query groups over paged keys and values.

A group is a run of consecutive tokens of one sequence: one token in decoding, a tile of a prompt in prefill. The
context is read block by block with a running softmax, so no dense copy of it is made. ``paged_attention_reference`` is
the specification, ``_by_blocks`` the form for CPUs, and ``paged_attention_mosaic`` the kernel for Hopper.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from gimbal_jax.pallas_kernels.backend import Backend
from gimbal_jax.pallas_kernels.paged_attention_mosaic import attend_pages

BLOCK = 128
"""Context tokens per turn of the loop; a block has at least one page."""
DECODE_BLOCK = 64
"""Context tokens per turn on a CPU for groups of one token. On average, half of the last block is wasted. Thus with
128, 32 rows take 1.25 times as long at 160 tokens of context, and 0.93 times as long at 1,000."""


def paged_attention(
    q_GQHD: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table_GM: jax.Array,
    start_G: jax.Array,
    count_G: jax.Array,
    *,
    window: int | None = None,
    backend: Backend = "xla",
) -> jax.Array:
    """Attend from G groups of Q consecutive tokens to their sequences' pages.

    The pages must already hold the keys and values of the groups' own tokens.

    Args:
      q_GQHD: queries; each of the K key-value heads serves H / K query heads.
      k_pages: keys, [pages, page_size, K, D].
      v_pages: values, [pages, page_size, K, D].
      page_table_GM: int32 pages of each group's sequence, in order.
      start_G: int32 position of the group's first token.
      count_G: int32 tokens in the group, at most Q; its other rows are padding.
      window: each token sees only the last ``window`` positions, including its own; None is all positions.
      backend: form to run.

    Returns:
      [G, Q, H, D] in the type of q; padding rows are 0.

    Raises:
      ValueError: the kernel does not take such arrays (see ``mosaic_limits``).
    """
    args = q_GQHD, k_pages, v_pages, page_table_GM, start_G, count_G
    match backend:
        case "xla":
            form = _by_wide_blocks if q_GQHD.shape[1] == 1 < k_pages.shape[2] else _by_blocks
            return form(q_GQHD / math.sqrt(q_GQHD.shape[-1]), *args[1:], window=window)
        case "mosaic":
            return attend_pages(*args, window=window, interpret=None)
        case "interpret":
            return attend_pages(*args, window=window, interpret=plgpu.InterpretGPUParams())


def paged_attention_reference(
    q_GQHD: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table_GM: jax.Array,
    start_G: jax.Array,
    count_G: jax.Array,
    *,
    window: int | None = None,
) -> jax.Array:
    """Compute ``paged_attention`` in plain XLA; the specification."""
    (groups, queries, heads, dim), (_, page_size, kv_heads, _) = q_GQHD.shape, k_pages.shape
    pages_per_block = max(1, BLOCK // page_size)
    block = pages_per_block * page_size
    blocks = -(-page_table_GM.shape[1] // pages_per_block)
    table_GM = jnp.pad(page_table_GM, ((0, 0), (0, blocks * pages_per_block - page_table_GM.shape[1])))

    q = q_GQHD.reshape(groups, queries, kv_heads, heads // kv_heads, dim) / math.sqrt(dim)
    position_GQ = start_G[:, None] + jnp.arange(queries)
    valid_GQ = jnp.arange(queries) < count_G[:, None]
    # The loop ends after the longest context.
    last = jnp.max(jnp.where(count_G > 0, start_G + count_G, 0))

    def one_block(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        top, total, out = carry
        pages_Gb = jax.lax.dynamic_slice_in_dim(table_GM, i * pages_per_block, pages_per_block, axis=1)
        k = k_pages[pages_Gb].reshape(groups, block, kv_heads, dim)
        v = v_pages[pages_Gb].reshape(groups, block, kv_heads, dim)
        context_b = i * block + jnp.arange(block)
        seen_GQb = (context_b <= position_GQ[..., None]) & valid_GQ[..., None]
        if window is not None:
            seen_GQb &= context_b > position_GQ[..., None] - window
        seen = seen_GQb[:, None, None]
        score = jnp.einsum("gqknd,gbkd->gknqb", q, k, preferred_element_type=jnp.float32)
        score = jnp.where(seen, score, -jnp.inf)
        # Running softmax: rescale earlier sums to the new maximum.
        new_top = jnp.maximum(top, score.max(axis=-1))
        # A row that has seen nothing yet has top = -inf, and exp(-inf - -inf) is NaN.
        safe_top = jnp.where(jnp.isfinite(new_top), new_top, 0.0)
        share = jnp.exp(score - safe_top[..., None])
        keep = jnp.exp(top - safe_top)
        # Unused pages may hold NaN, and 0 * NaN is NaN, so their values are cleared.
        v = jnp.where(seen_GQb.any(axis=1)[..., None, None], v, 0)
        gain = jnp.einsum("gknqb,gbkd->gknqd", share.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_top, total * keep + share.sum(axis=-1), out * keep[..., None] + gain

    shape = (groups, kv_heads, heads // kv_heads, queries)
    start = (jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape), jnp.zeros((*shape, dim)))
    _, total, out = jax.lax.fori_loop(0, -(-last // block), one_block, start)
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(q_GQHD.shape).astype(q_GQHD.dtype)


def _by_wide_blocks(
    q_GQHD: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table_GM: jax.Array,
    start_G: jax.Array,
    count_G: jax.Array,
    *,
    window: int | None,
) -> jax.Array:
    """Compute ``_by_blocks`` for few queries, with all KV heads of a token as one wide head.

    A query is 0 except in the part of its own head. The products multiply by zeros, but no block of keys or values must
    be transposed.
    """
    (groups, queries, heads, dim), (num_pages, page_size, kv_heads, _) = q_GQHD.shape, k_pages.shape
    own_KK = jnp.eye(kv_heads, dtype=q_GQHD.dtype)
    q_GQKhKD = q_GQHD.reshape(groups, queries, kv_heads, -1, 1, dim) * own_KK[:, None, :, None]
    wide_q = q_GQKhKD.reshape(groups, queries, heads, -1)
    wide_k, wide_v = (part.reshape(num_pages, page_size, 1, kv_heads * dim) for part in (k_pages, v_pages))
    out = _by_blocks(wide_q, wide_k, wide_v, page_table_GM, start_G, count_G, window=window)
    out_GQKhKD = out.reshape(q_GQKhKD.shape)
    own = [out_GQKhKD[:, :, head, :, head] for head in range(kv_heads)]
    return jnp.stack(own, axis=2).reshape(q_GQHD.shape)


def _by_blocks(
    q_GQHD: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table_GM: jax.Array,
    start_G: jax.Array,
    count_G: jax.Array,
    *,
    window: int | None,
) -> jax.Array:
    """Compute the reference for CPUs, with products in a form that XLA's CPU library takes directly.

    Each KV head of a group is an element of one batch axis B. Its rows r are the queries of the heads that share it.
    The queries must be scaled already.
    """
    (groups, queries, heads, dim), (num_pages, page_size, kv_heads, _) = q_GQHD.shape, k_pages.shape
    share = heads // kv_heads
    pages_per_block = max(1, (BLOCK if queries > 1 else DECODE_BLOCK) // page_size)
    block = pages_per_block * page_size
    blocks = -(-page_table_GM.shape[1] // pages_per_block)
    table_GM = jnp.pad(page_table_GM, ((0, 0), (0, blocks * pages_per_block - page_table_GM.shape[1])))

    q_GQKhD = q_GQHD.reshape(groups, queries, kv_heads, share, dim)
    q_BrD = q_GQKhD.swapaxes(1, 2).reshape(groups * kv_heads, queries * share, dim)
    position_GQ = start_G[:, None] + jnp.arange(queries)
    # Position of each row, and first position and end of each element's group.
    position_Br = jnp.repeat(jnp.repeat(position_GQ, share, axis=1), kv_heads, axis=0)
    end_G = jnp.where(count_G > 0, start_G + count_G, 0)
    start_B1, end_B1 = jnp.repeat(start_G, kv_heads)[:, None], jnp.repeat(end_G, kv_heads)[:, None]

    def one_block(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        top_Br, total_Br, out_BrD = carry
        pages_Gb = jax.lax.dynamic_slice_in_dim(table_GM, i * pages_per_block, pages_per_block, axis=1)
        context_b = i * block + jnp.arange(block)
        used_Bb, seen_Brb = context_b < end_B1, context_b <= position_Br[..., None]
        if window is not None:
            used_Bb &= context_b > start_B1 - window
            seen_Brb &= context_b > position_Br[..., None] - window

        def block_of(pages: jax.Array) -> jax.Array:
            rows = pages.reshape(num_pages, -1)[pages_Gb]  # one row per page, so that each page is one copy
            return rows.reshape(groups, block, kv_heads, dim).swapaxes(1, 2).reshape(-1, block, dim)

        score_Brb = jnp.einsum("Brd,Bbd->Brb", q_BrD, block_of(k_pages), preferred_element_type=jnp.float32)
        score_Brb = jnp.where(seen_Brb, score_Brb, -jnp.inf)
        # Running softmax: rescale earlier sums to the new maximum.
        new_top_Br = jnp.maximum(top_Br, score_Brb.max(axis=-1))
        # A row that has seen nothing yet has top = -inf, and exp(-inf - -inf) is NaN.
        safe_top_Br = jnp.where(jnp.isfinite(new_top_Br), new_top_Br, 0.0)
        part_Brb = jnp.exp(score_Brb - safe_top_Br[..., None])
        keep_Br = jnp.exp(top_Br - safe_top_Br)
        # Unused pages may hold NaN, and 0 * NaN is NaN, so their values are cleared.
        v_Bbd = jnp.where(used_Bb[..., None], block_of(v_pages), 0)
        gain_BrD = jnp.einsum("Brb,Bbd->Brd", part_Brb.astype(v_Bbd.dtype), v_Bbd, preferred_element_type=jnp.float32)
        total_Br = total_Br * keep_Br + part_Brb.sum(axis=-1)
        return new_top_Br, total_Br, out_BrD * keep_Br[..., None] + gain_BrD

    rows = q_BrD.shape[:2]
    start = (jnp.full(rows, -jnp.inf, jnp.float32), jnp.zeros(rows), jnp.zeros(q_BrD.shape))
    _, total_Br, out_BrD = jax.lax.fori_loop(0, -(-jnp.max(end_G) // block), one_block, start)
    out_BrD = out_BrD / jnp.where(total_Br > 0, total_Br, 1.0)[..., None]
    out_GQHD = out_BrD.reshape(groups, kv_heads, queries, share, dim).swapaxes(1, 2).reshape(q_GQHD.shape)
    valid_GQ = jnp.arange(queries) < count_G[:, None]
    return jnp.where(valid_GQ[..., None, None], out_GQHD, 0).astype(q_GQHD.dtype)
