"""``paged_attention`` as one kernel for NVIDIA Hopper (Mosaic GPU), for decoding and for prefill tiles.

The queries of a group that share a KV head are the rows of one matrix product, 64 for each warpgroup. The rows are in
order of the query, then of its heads. Unused rows hold garbage, which affects no other row, and are not written. A
block of the grid reads its context in steps of 64 tokens with a running softmax in base 2. The TMA unit loads pages
ahead of use, at indices from the page table. The first warpgroup starts these loads.

If there are few groups, several blocks share one context. Each block computes some of its steps, and XLA merges their
results.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64
"""Rows of a warpgroup's matrix product."""
STEP = 64
"""Context tokens of a step."""
STAGES = 3
"""Steps whose keys and values are in shared memory at the same time. With three, two decode blocks fit on a core."""
WARPGROUPS = 264
"""Warpgroups that keep a GPU busy: two for each of an H100's 132 cores."""
LEAST = -1e30
"""Initial running maximum. It is finite, so that a row that has seen nothing has weights of 0, not NaN."""
PAGE_SIZES = (8, 16, 32, 64, 128)
"""Supported tokens of a page."""
HEAD_DIMS = (64, 128)
"""Supported sizes of a head."""

MATRIX = plgpu.Layout.WGMMA
"""Register layout of the matrices."""
ROW = MATRIX.reduce(1)
"""Register layout of one number per row of a matrix."""

Ref = Any
"""Reference to memory; Pallas has no public type for it."""
Int = int | jax.Array


def mosaic_limits(dtype: Any, head_dim: int, page_size: int, heads_per_kv_head: int) -> list[str]:
    """Return the limits of the kernel that a model exceeds, one text each; empty if the kernel supports it.

    Args:
      dtype: type of queries, keys and values.
      head_dim: size of a head.
      page_size: tokens of a page.
      heads_per_kv_head: query heads that share a KV head.
    """
    problems = []
    if jnp.dtype(dtype) != jnp.bfloat16:
        problems.append(f"dtype is {jnp.dtype(dtype)}; the attention kernel takes bfloat16")
    if head_dim not in HEAD_DIMS:
        problems.append(f"head_dim is {head_dim}; the attention kernel takes one of {HEAD_DIMS}")
    if page_size not in PAGE_SIZES:
        problems.append(f"page_size is {page_size}; the attention kernel takes one of {PAGE_SIZES}")
    if heads_per_kv_head > ROWS:
        problems.append(f"{heads_per_kv_head} query heads share a KV head; the attention kernel takes at most {ROWS}")
    return problems


@dataclass(frozen=True)
class Cut:
    """Division of the queries and the context of one KV head of a group into blocks."""

    queries: int
    """Queries of a warpgroup."""
    warpgroups: int
    """Warpgroups of a block; they read the same keys and values."""
    blocks: int
    """Blocks along the queries of a group."""
    splits: int
    """Blocks that share a context."""


def cut(groups: int, queries: int, kv_heads: int, heads_per_kv_head: int, context: int) -> Cut:
    """Choose a division that fills the rows of a warpgroup first, then the GPU.

    Args:
      groups, queries, kv_heads, heads_per_kv_head: sizes of the call.
      context: tokens of the longest context that its page table can hold.
    """
    warpgroup_queries = max(n for n in range(1, queries + 1) if queries % n == 0 and n * heads_per_kv_head <= ROWS)
    parts = queries // warpgroup_queries
    warpgroups = 2 if parts % 2 == 0 else 1
    splits = WARPGROUPS // (groups * kv_heads * parts)
    return Cut(warpgroup_queries, warpgroups, parts // warpgroups, max(1, min(splits, pl.cdiv(context, STEP))))


def attend_pages(
    q_GQHD: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table_GM: jax.Array,
    start_G: jax.Array,
    count_G: jax.Array,
    *,
    window: int | None,
    interpret: plgpu.InterpretGPUParams | None,
    splits: int | None = None,
) -> jax.Array:
    """Run the kernel, then merge the results if blocks share contexts.

    The other arguments and the result are those of ``paged_attention``.

    Args:
      interpret: settings to interpret the kernel on the CPU; None compiles it.
      splits: blocks that share a context; None is as many as fill the GPU.

    Raises:
      ValueError: the kernel does not take such arrays (see ``mosaic_limits``).
    """
    (groups, queries, heads, dim), (_, page_size, kv_heads, _) = q_GQHD.shape, k_pages.shape
    share = heads // kv_heads
    if limits := mosaic_limits(q_GQHD.dtype, dim, page_size, share):
        raise ValueError("; ".join(limits))
    c = cut(groups, queries, kv_heads, share, page_table_GM.shape[1] * page_size)
    splits = splits or c.splits
    # Partial results are float32. They reuse the memory of the bfloat16 queries, so they are written half by half.
    out_dtype, columns = (jnp.float32, dim // 2) if splits > 1 else (q_GQHD.dtype, dim)
    out_type = [jax.ShapeDtypeStruct((splits, groups, queries, kv_heads, share, dim), out_dtype)]
    if splits > 1:
        out_type.append(jax.ShapeDtypeStruct((splits, groups, kv_heads, c.blocks, c.warpgroups, ROWS), jnp.float32))
    # Shared memory and barriers below belong to one block of the grid.
    pages = plgpu.SMEM((STAGES, STEP, dim), k_pages.dtype)
    loaded = plgpu.Barrier(num_arrivals=max(1, STEP // page_size), num_barriers=STAGES)
    out_SGQKhD, *log_sum = plgpu.kernel(
        functools.partial(_attend_block, c=c, splits=splits, window=window, interpret=interpret is not None),
        out_type=out_type,
        grid=(groups, kv_heads, c.blocks, splits),
        grid_names=("group", "kv_head", "block", "split"),
        num_threads=c.warpgroups,
        thread_name="warpgroup",
        kernel_name="paged_attention",
        scratch_types=dict(
            q_or_out=plgpu.RefUnion(
                plgpu.SMEM((c.warpgroups, ROWS, dim), q_GQHD.dtype),
                plgpu.SMEM((c.warpgroups, ROWS, columns), out_dtype),
            ),
            k_smem=pages,
            v_smem=pages,
            q_loaded=plgpu.Barrier(num_arrivals=c.queries, num_barriers=c.warpgroups),
            q_taken=plgpu.Barrier(num_arrivals=c.warpgroups),
            k_loaded=loaded,
            v_loaded=loaded,
            used=plgpu.Barrier(num_arrivals=c.warpgroups, num_barriers=STAGES),
            cleaned=plgpu.Barrier(num_arrivals=c.warpgroups),
        ),
        # Rows are reduced within a warp, which needs no shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(q_GQHD.reshape(groups, queries, kv_heads, share, dim), k_pages, v_pages, page_table_GM, start_G, count_G)
    if splits == 1:
        return out_SGQKhD.reshape(q_GQHD.shape)
    # Drop the unused rows of each warpgroup.
    log_sum_SGKQh = log_sum[0][..., : c.queries * share].reshape(splits, groups, kv_heads, queries, share)
    return merge(out_SGQKhD, log_sum_SGKQh.swapaxes(2, 3)).reshape(q_GQHD.shape).astype(q_GQHD.dtype)


def merge(out_SXD: jax.Array, log_sum_SX: jax.Array) -> jax.Array:
    """Return the attention over a whole context from the attention over S parts of it.

    Args:
      out_SXD: results of the parts, for any axes X.
      log_sum_SX: base 2 logarithms of the parts' sums of exponentials; minus infinity for a part with no visible token.

    Returns:
      [X, D]; 0 if no part has a visible token.
    """
    # Weights are relative to the largest part, so that none overflows.
    top_X = log_sum_SX.max(axis=0)
    weight_SX = jnp.exp2(log_sum_SX - jnp.where(jnp.isfinite(top_X), top_X, 0))
    total_X = weight_SX.sum(axis=0)
    return (weight_SX[..., None] * out_SXD).sum(axis=0) / jnp.where(total_X > 0, total_X, 1)[..., None]


def seen_by(start: Int, count: Int, window: int | None) -> tuple[jax.Array, jax.Array]:
    """Return the context [begin, end) that at least one of ``count`` tokens from position ``start`` on sees."""
    begin = jnp.int32(0) if window is None else jnp.maximum(start - window + 1, 0)
    return begin, jnp.where(count > 0, start + count, 0)


def steps_of(begin: Int, end: Int, split: Int, splits: int) -> tuple[jax.Array, jax.Array]:
    """Return the first step and the number of steps of a split's equal share of the context [begin, end).

    There are no steps if ``end`` is 0.
    """
    first = lax.div(begin, STEP)
    steps = jnp.maximum(pl.cdiv(end, STEP) - first, 0)
    share = pl.cdiv(steps, splits)
    return first + split * share, jnp.clip(steps - split * share, 0, share)


def _attend_block(
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    table_ref: Ref,
    start_ref: Ref,
    count_ref: Ref,
    out_ref: Ref,
    *log_sum_ref: Ref,
    q_or_out: Ref,
    k_smem: Ref,
    v_smem: Ref,
    q_loaded: Ref,
    q_taken: Ref,
    k_loaded: Ref,
    v_loaded: Ref,
    used: Ref,
    cleaned: Ref,
    c: Cut,
    splits: int,
    window: int | None,
    interpret: bool,
) -> None:
    """Attend from the queries of one block to one split of their context.

    Args:
      q_ref: [G, Q, K, heads per KV head, D] queries, as in the kernel's call.
      k_ref, v_ref, table_ref, start_ref, count_ref: arguments of ``paged_attention``.
      out_ref: [splits, G, Q, K, heads per KV head, D] results.
      log_sum_ref: one reference with splits, none without: logarithms of the sums of exponentials.
      q_or_out: shared memory of each warpgroup, for its queries and later for its results.
      k_smem, v_smem: shared memory of ``STAGES`` steps.
      q_loaded, k_loaded, v_loaded: barriers of completed loads.
      q_taken: barrier after which the memory of the queries may be overwritten.
      used: barriers after which a stage may be overwritten.
      cleaned: barrier after which invisible values are 0.
      c, splits, window, interpret: see ``attend_pages``.
    """
    group, kv_head, block, split = (lax.axis_index(name) for name in ("group", "kv_head", "block", "split"))
    warpgroup = lax.axis_index("warpgroup")
    q_smem, out_smem = (ref.at[warpgroup] for ref in q_or_out)
    page_size, (_, _, _, share, dim) = k_ref.shape[1], q_ref.shape

    # The part of the context that this block's queries see, and this split's share of it.
    first = block * c.warpgroups * c.queries
    start = start_ref[group] + first
    count = jnp.clip(count_ref[group] - first, 0, c.warpgroups * c.queries)
    begin, end = seen_by(start, count, window)
    first_step, steps = steps_of(begin, end, split, splits)

    def load(i: jax.Array) -> None:
        slot, piece = lax.rem(i, STAGES), min(page_size, STEP)
        for at in range(0, STEP, piece):
            # Past the end of the context, load its last piece again, because no further page need exist.
            token = jnp.minimum((first_step + i) * STEP + at, lax.div(end - 1, piece) * piece)
            source = table_ref[group, lax.div(token, page_size)], pl.ds(lax.rem(token, page_size), piece), kv_head
            place = slot, pl.ds(at, piece)
            plgpu.copy_gmem_to_smem(k_ref.at[source], k_smem.at[place], k_loaded.at[slot])
            plgpu.copy_gmem_to_smem(v_ref.at[source], v_smem.at[place], v_loaded.at[slot])

    # Fill all stages before the first step.
    for i in range(STAGES):
        pl.when((warpgroup == 0) & (i < steps))(functools.partial(load, jnp.int32(i)))

    # Queries go to registers, so that their shared memory is free for the results.
    first_query = warpgroup * c.queries
    rows = [(first + first_query + i, pl.ds(i * share, share)) for i in range(c.queries)]
    for query, place in rows:
        plgpu.copy_gmem_to_smem(q_ref.at[group, query, kv_head], q_smem.at[place], q_loaded.at[warpgroup])
    plgpu.barrier_wait(q_loaded.at[warpgroup])
    q = plgpu.load(q_smem, layout=MATRIX, optimized=False)
    plgpu.barrier_arrive(q_taken)

    query = first_query + lax.div(plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW), share)
    position = jnp.where(query < count, start + query, -1)  # padding sees nothing

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        out, top, total = carry
        slot, token = lax.rem(i, STAGES), (first_step + i) * STEP

        # Reuse the slot of the previous step, not of this one: the other warpgroup has most likely finished reading it.
        @pl.when((warpgroup == 0) & (i > 0) & (i + STAGES - 1 < steps))
        def _load_ahead() -> None:
            plgpu.barrier_wait(used.at[lax.rem(i - 1, STAGES)])
            load(i + STAGES - 1)

        # Scores in base 2: the factor turns exp into exp2.
        plgpu.barrier_wait(k_loaded.at[slot])
        score = _product(q, k_smem.at[slot].transpose((1, 0)), interpret=interpret)
        context = token + plgpu.broadcasted_iota(jnp.int32, score.shape, 1, layout=MATRIX)
        seen = context <= lax.broadcast_in_dim(position, score.shape, [0])
        if window is not None:
            seen &= context > lax.broadcast_in_dim(position - window, score.shape, [0])
        score = jnp.where(seen, score * (math.log2(math.e) / math.sqrt(dim)), -jnp.inf)
        # Running softmax: rescale earlier sums to the new maximum.
        new_top = jnp.maximum(top, score.max(axis=1))
        keep = jnp.exp2(top - new_top)
        weight = jnp.exp2(score - lax.broadcast_in_dim(new_top, score.shape, [0]))
        total = total * keep + weight.sum(axis=1)
        out = out * lax.broadcast_in_dim(keep, out.shape, [0])

        plgpu.barrier_wait(v_loaded.at[slot])

        # Clear values outside of the context: they may be NaN, and 0 * NaN is NaN.
        @pl.when((token < begin) | (token + STEP > end))
        def _clean() -> None:
            @pl.when(warpgroup == 0)
            def _clear() -> None:
                v = plgpu.load(v_smem.at[slot], layout=MATRIX)
                context = token + plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=MATRIX)
                v_smem[slot] = jnp.where((context >= begin) & (context < end), v, 0)
                plgpu.commit_smem()

            plgpu.barrier_arrive(cleaned)
            plgpu.barrier_wait(cleaned)

        out = _product(weight.astype(q.dtype), v_smem.at[slot], onto=out, interpret=interpret)
        plgpu.barrier_arrive(used.at[slot])
        return out, new_top, total

    out, top, total = lax.fori_loop(
        0,
        steps,
        step,
        (
            plgpu.layout_cast(jnp.zeros((ROWS, dim), jnp.float32), MATRIX),
            plgpu.layout_cast(jnp.full(ROWS, LEAST, jnp.float32), ROW),
            plgpu.layout_cast(jnp.zeros(ROWS, jnp.float32), ROW),
        ),
    )
    out = out / lax.broadcast_in_dim(jnp.where(total > 0, total, 1), out.shape, [0])
    # All warpgroups must have read their queries before results overwrite them.
    columns = out_smem.shape[1]
    plgpu.barrier_wait(q_taken)
    for at in range(0, dim, columns):
        out_smem[...] = out[:, at : at + columns].astype(out_smem.dtype)
        plgpu.commit_smem()
        for query, place in rows:
            plgpu.copy_smem_to_gmem(out_smem.at[place], out_ref.at[split, group, query, kv_head, :, pl.ds(at, columns)])
        plgpu.wait_smem_to_gmem(0)
    for ref in log_sum_ref:
        ref[split, group, kv_head, block, warpgroup] = top + jnp.log2(total)


def _product(a: jax.Array, b_ref: Ref, *, interpret: bool, onto: jax.Array | None = None) -> jax.Array:
    """Return ``a @ b`` in float32, added to ``onto`` if given; a is in registers and b in shared memory."""
    if interpret:  # The interpreter has no product of registers with shared memory.
        product = jnp.dot(a.astype(jnp.float32), b_ref[...].astype(jnp.float32))
        plgpu.commit_smem()  # These reads, unlike those of wgmma, are not ordered with the writes of the TMA unit.
        return product if onto is None else onto + product
    if onto is not None:
        return pl.run_state(lambda acc: plgpu.wgmma(acc, a, b_ref))(plgpu.WGMMAAccumulatorRef.init(onto))

    def fresh(acc: Ref) -> jax.Array:
        plgpu.wgmma(acc, a, b_ref)
        return acc[...]

    return pl.run_scoped(fresh, plgpu.WGMMAAccumulatorRef((a.shape[0], b_ref.shape[1]), jnp.float32))
