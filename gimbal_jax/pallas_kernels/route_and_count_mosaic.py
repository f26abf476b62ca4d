"""``route_and_count`` as one kernel for NVIDIA Hopper (Mosaic GPU).

A block routes 64 tokens. Their logits come to shared memory once; all later passes read them there, a chunk of
columns at a time, so that nothing depends on how many experts there are. A choice is the largest logit after the
choice before, in the order (logit falling, expert rising); so nothing has to be marked as taken, and a row of equal
logits, minus infinity too, needs no special case. After the last choice one comparison tells which columns were chosen.
The product of a strictly lower triangular matrix with these marks counts the earlier tokens of the block in every
column, exactly: they are at most 63. What earlier blocks sent is added outside, from one row of counts per block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

BLOCK = 64
"""Tokens of a block: the rows of one warpgroup's matrix product."""
CHUNK = 128
"""Columns that stand in registers at a time."""
TILE = 32
"""Columns of a tile in shared memory; experts are padded to whole tiles."""
MAX_EXPERTS = 512
"""More would not fit into shared memory."""
MAX_RANKS = CHUNK

MATRIX = plgpu.Layout.WGMMA
ROW = MATRIX.reduce(1)
COLUMN = MATRIX.reduce(0)

SLOT_BITS = 16
"""A choice is one number, expert << SLOT_BITS | slot: the smaller is the lower expert."""
NO_CHOICE = jnp.iinfo(jnp.int32).max


def route_blocks(
    logits_TE: jax.Array,
    valid_T: jax.Array,
    slot_of_expert_E: jax.Array,
    *,
    k: int,
    renormalise: bool,
    ranks: int,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, ...]:
    """The kernel: ``Routing`` by blocks of tokens, of which the last may be partly empty.

    Args: those of ``route_and_count``, and
      interpret: how to interpret the kernel on the CPU; None compiles it.

    Returns:
      slot, weight: [T, k], as in ``Routing``.
      choice: int32 [T, k] earlier tokens of the block with the same slot, times MAX_EXPERTS, plus the expert.
      place: int32 [T, R] earlier tokens of the block with a slot on that rank; -1 where this token has none.
      marks: int32 [blocks, E + R] tokens of the block by expert, then by rank.
    """
    tokens, experts = logits_TE.shape
    blocks = pl.cdiv(tokens, BLOCK)
    rows, columns = _up(tokens, 8) if tokens > 8 else tokens, _up(experts, TILE)
    logits_TE = jnp.pad(logits_TE.astype(jnp.float32), ((0, rows - tokens), (0, columns - experts)))
    valid_T = jnp.pad(valid_T.astype(jnp.int32), (0, blocks * BLOCK - tokens))
    slot_E = jnp.pad(slot_of_expert_E.astype(jnp.int32), (0, columns - experts))
    rank_columns = _up(ranks, TILE)
    chunks = [slice(start, min(start + CHUNK, columns)) for start in range(0, columns, CHUNK)]
    of_ranks = slice(columns, columns + rank_columns)

    def kernel(logits, valid, slots, slot_out, weight_out, choice_out, place_out, marks_out, *scratch):  # type: ignore[no-untyped-def]
        x_s, marks_s, below_s, choice_s, weight_s, loaded = scratch
        block = lax.axis_index("block")
        here = pl.ds(block * BLOCK, BLOCK)
        plgpu.copy_gmem_to_smem(logits.at[here], x_s, loaded)

        def spread(row: jax.Array, like: slice) -> jax.Array:
            return lax.broadcast_in_dim(row, (BLOCK, like.stop - like.start), (0,))

        def iota(of: slice, axis: int) -> jax.Array:
            shape = (BLOCK, of.stop - of.start)
            return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=MATRIX) + (of.start if axis else 0)

        def logits_of(chunk: slice) -> jax.Array:
            return plgpu.load(x_s.at[:, chunk], layout=MATRIX)

        def choices_of(chunk: slice) -> jax.Array:
            slot = plgpu.load(slots.at[chunk], layout=COLUMN, optimized=False)
            expert = iota(chunk, 1)
            return (expert << SLOT_BITS) | lax.broadcast_in_dim(slot, expert.shape, (1,))

        own = slice(0, BLOCK)
        below_s[...] = jnp.where(iota(own, 1) < iota(own, 0), 1.0, 0.0).astype(jnp.bfloat16)
        is_valid = plgpu.load(valid.at[here], layout=ROW, optimized=False) > 0

        plgpu.barrier_wait(loaded)
        top = plgpu.layout_cast(jnp.full((BLOCK,), -jnp.inf, jnp.float32), ROW)
        for chunk in chunks:
            x = logits_of(chunk)
            bad = x != x
            if chunk.stop > experts:
                bad |= iota(chunk, 1) >= experts
            x = jnp.where(bad, -jnp.inf, x)
            x_s[:, chunk] = x
            top = jnp.maximum(top, jnp.max(x, axis=1))
        shift = jnp.where(jnp.abs(top) < jnp.inf, top, 0.0)

        def choose(j, carry):  # type: ignore[no-untyped-def]
            last, last_choice, on_rank, total = carry
            best = jnp.full_like(last, -jnp.inf)
            choice = jnp.full_like(last_choice, NO_CHOICE)
            for chunk in chunks:
                x, choices = logits_of(chunk), choices_of(chunk)
                left = (x < spread(last, chunk)) | ((x == spread(last, chunk)) & (choices > spread(last_choice, chunk)))
                if chunk.stop > experts:
                    left &= iota(chunk, 1) < experts
                top_here = jnp.max(jnp.where(left, x, -jnp.inf), axis=1)
                first = left & (x == spread(top_here, chunk))
                choice_here = jnp.min(jnp.where(first, choices, NO_CHOICE), axis=1)
                better = (top_here > best) | (choice == NO_CHOICE)
                best, choice = jnp.where(better, top_here, best), jnp.where(better, choice_here, choice)
            slot = choice & ((1 << SLOT_BITS) - 1)
            plgpu.store(slot_out.at[here, j], jnp.where(is_valid, slot, -1), optimized=False)
            weight = jnp.exp(best - shift)
            choice_s[j], weight_s[j] = choice, weight
            rank = lax.div(slot, jnp.int32(experts // ranks))
            on_rank = jnp.where(iota(of_ranks, 1) - columns == spread(rank, of_ranks), 1.0, on_rank)
            return best, choice, on_rank, total + weight

        zero = jnp.zeros_like(top)
        start = (
            jnp.full_like(top, jnp.inf),
            plgpu.layout_cast(jnp.full((BLOCK,), -1, jnp.int32), ROW),
            plgpu.layout_cast(jnp.zeros((BLOCK, rank_columns), jnp.float32), MATRIX),
            zero,
        )
        last, last_choice, on_rank, total = lax.fori_loop(0, k, choose, start)
        if not renormalise:
            total = zero
            for chunk in chunks:
                total += jnp.sum(jnp.exp(logits_of(chunk) - spread(shift, chunk)), axis=1)

        def mark(of: slice, marked: jax.Array) -> None:
            marked = jnp.where(spread(is_valid, of), marked, 0.0)
            marks_s[:, of] = marked.astype(jnp.bfloat16)
            count = jnp.sum(marked, axis=0).astype(jnp.int32)
            plgpu.store(marks_out.at[block, of], count, optimized=False)

        for chunk in chunks:
            x = logits_of(chunk)
            tie = (x == spread(last, chunk)) & (choices_of(chunk) <= spread(last_choice, chunk))
            mark(chunk, jnp.where((x > spread(last, chunk)) | tie, 1.0, 0.0))
        mark(of_ranks, on_rank)
        plgpu.commit_smem()

        def earlier(of: slice) -> jax.Array:
            def product(sums):  # type: ignore[no-untyped-def]
                plgpu.wgmma(sums, below_s, marks_s.at[:, of])
                return sums[...]

            return pl.run_scoped(product, plgpu.ACC((BLOCK, of.stop - of.start), jnp.float32))

        for chunk in chunks:
            x_s[:, chunk] = earlier(chunk)
        sent = spread(is_valid, of_ranks) & (on_rank > 0)
        place = jnp.where(sent, earlier(of_ranks), -1.0).astype(jnp.int32)
        plgpu.store(place_out.at[here], place, optimized=False)

        def place_choice(j, _):  # type: ignore[no-untyped-def]
            choice = plgpu.load(choice_s.at[j], layout=ROW)
            position = zero
            for chunk in chunks:
                here_ = choices_of(chunk) == spread(choice, chunk)
                position += jnp.sum(jnp.where(here_, logits_of(chunk), 0.0), axis=1)
            packed = position.astype(jnp.int32) * MAX_EXPERTS + (choice >> SLOT_BITS)
            plgpu.store(choice_out.at[here, j], jnp.where(is_valid, packed, 0), optimized=False)
            weight = plgpu.load(weight_s.at[j], layout=ROW) / jnp.where(total > 0, total, 1.0)
            plgpu.store(weight_out.at[here, j], jnp.where(is_valid, weight, 0.0), optimized=False)

        lax.fori_loop(0, k, place_choice, None)

    logits_tiles = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))
    marks_tiles = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(64))
    padded = blocks * BLOCK
    slot, weight, choice, place, marks = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((padded, k), jnp.int32),
            jax.ShapeDtypeStruct((padded, k), jnp.float32),
            jax.ShapeDtypeStruct((padded, k), jnp.int32),
            jax.ShapeDtypeStruct((padded, rank_columns), jnp.int32),
            jax.ShapeDtypeStruct((blocks, columns + rank_columns), jnp.int32),
        ),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((BLOCK, columns), jnp.float32, transforms=logits_tiles),
            plgpu.SMEM((BLOCK, columns + rank_columns), jnp.bfloat16, transforms=marks_tiles),
            plgpu.SMEM((BLOCK, BLOCK), jnp.bfloat16, transforms=marks_tiles),
            plgpu.SMEM((k, BLOCK), jnp.int32),
            plgpu.SMEM((k, BLOCK), jnp.float32),
            plgpu.Barrier(),
        ],
        interpret=interpret,
    )(logits_TE, valid_T, slot_E)
    return slot, weight, choice, place, marks


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
