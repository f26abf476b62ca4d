"""``route_and_count`` as one kernel for NVIDIA Hopper (Mosaic GPU).

A block routes 64 tokens. Their logits are copied to shared memory once. All passes read them there, one chunk of
columns at a time, so that registers suffice for any number of experts.

A choice is the first logit after the previous choice, in the order of falling logits, then of rising experts. So no
column must be marked as taken, and a row of equal logits, even of minus infinity, is no special case. After the last
choice, one comparison finds the chosen columns. The product of a strictly lower triangular matrix with these marks
counts the earlier tokens of the block in every column; counts up to 63 are exact. The kernel returns one row of counts
per block, and the caller adds those of earlier blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

BLOCK = 64
"""Tokens of a block, the rows of one matrix product."""
CHUNK = 128
"""Most columns in registers at the same time."""
TILE = 32
"""Columns of a tile in shared memory. Experts are padded to whole tiles."""
MAX_EXPERTS = 512
"""Most experts that fit into shared memory."""
MAX_RANKS = 64
"""Most ranks, whose marks stay in registers during all choices."""
SLOT_BITS = 16
"""Bits of the slot in a choice. A choice is the number expert << SLOT_BITS | slot, so that one minimum finds the lower
expert and its slot."""
NO_CHOICE = jnp.iinfo(jnp.int32).max
"""Choice of a row that has none in some columns; above all other choices."""

MATRIX = plgpu.Layout.WGMMA
"""Register layout of the matrices."""
ROW = MATRIX.reduce(1)
"""Register layout of one number per token."""
COLUMN = MATRIX.reduce(0)
"""Register layout of one number per column."""
Ref = Any
"""Reference to memory; Pallas has no public type for it."""
Columns = Any
"""Consecutive columns of the block, a ``pl.ds`` of known size."""


class RoutedBlocks(NamedTuple):
    """``Routing`` of T tokens in B blocks, each without the tokens of the others."""

    slot_Tk: jax.Array
    """int32 slot of each choice; -1 for padding."""
    weight_Tk: jax.Array
    """float32 weight of each choice; 0 for padding."""
    expert_Tk: jax.Array
    """int32 expert of each choice; 0 for padding."""
    position_Tk: jax.Array
    """int32 number of earlier tokens of the block that chose the same expert; 0 for padding."""
    place_TR: jax.Array
    """int32 number of earlier tokens of the block with a slot on each rank; -1 if this token has none there."""
    count_BE: jax.Array
    """int32 number of tokens of the block that chose each expert."""
    send_BR: jax.Array
    """int32 number of tokens of the block with a slot on each rank."""


def route_blocks(
    logits_TE: jax.Array,
    valid_T: jax.Array,
    slot_of_expert_E: jax.Array,
    *,
    k: int,
    renormalise: bool,
    ranks: int,
    counting: bool = True,
    interpret: Any = None,
) -> RoutedBlocks:
    """Run the kernel. The other arguments are those of ``route_and_count``.

    Args:
      counting: False writes slots and weights only, to measure the cost of counting (paper, figure 13).
      interpret: as for ``plgpu.kernel``.
    """
    # Experts and ranks are padded to whole tiles. The rank columns follow those of the experts.
    tokens, experts = logits_TE.shape
    blocks, columns, rank_columns = _up(tokens, BLOCK) // BLOCK, _up(experts, TILE), _up(ranks, TILE)
    width = max(width for width in range(TILE, CHUNK + 1, TILE) if columns % width == 0)
    on_ranks = pl.ds(columns, rank_columns)
    # The copy to shared memory fills the missing rows of a block, but requires whole tiles of eight rows.
    rows = tokens if tokens < 8 else _up(tokens, 8)
    # The last columns are minus infinity. They are never chosen, because at least k experts come before them.
    logits_TE = jnp.pad(
        logits_TE.astype(jnp.float32), ((0, rows - tokens), (0, columns - experts)), constant_values=-jnp.inf
    )
    valid_T = jnp.pad(valid_T.astype(jnp.int32), (0, blocks * BLOCK - tokens))
    slot_E = jnp.pad(slot_of_expert_E.astype(jnp.int32), (0, columns - experts))

    def for_chunks(body: Callable[[Columns, Any], Any], carry: Any) -> Any:
        return lax.fori_loop(0, columns // width, lambda i, carry: body(pl.ds(i * width, width), carry), carry)

    def route_and_count(
        logits_TE: Ref, valid_T: Ref, slot_E: Ref,
        slot_Tk: Ref, weight_Tk: Ref, choice_Tk: Ref, place_TR: Ref, count_BE: Ref, send_BR: Ref,
        x_s: Ref, marks_s: Ref, below_s: Ref, choice_s: Ref, weight_s: Ref, copied: Ref,
    ) -> None:  # fmt: skip
        block = lax.axis_index("block")
        here = pl.ds(block * BLOCK, BLOCK)
        plgpu.copy_gmem_to_smem(logits_TE.at[here], x_s, copied)
        valid = plgpu.load(valid_T.at[here], layout=ROW, optimized=False) > 0
        square = pl.ds(0, BLOCK)
        below_s[...] = jnp.where(_iota(square, 1) < _iota(square, 0), 1.0, 0.0).astype(jnp.bfloat16)

        plgpu.barrier_wait(copied)

        # First pass: NaN becomes minus infinity; find each row's greatest logit.
        def clean(chunk: Columns, top: jax.Array) -> jax.Array:
            x = _load(x_s, chunk)
            x = jnp.where(x == x, x, -jnp.inf)
            x_s[:, chunk] = x
            return jnp.maximum(top, jnp.max(x, axis=1))

        top = for_chunks(clean, _row(-jnp.inf, jnp.float32))
        shift = jnp.where(jnp.abs(top) < jnp.inf, top, 0.0)

        def add(chunk: Columns, total: jax.Array) -> jax.Array:
            return total + jnp.sum(jnp.exp(_load(x_s, chunk) - _spread(shift, chunk)), axis=1)

        # Second pass: the softmax total over all experts. With renormalise, the chosen ones are added up below.
        total = _row(0.0, jnp.float32)
        if not renormalise:
            total = for_chunks(add, total)

        # k passes, each for the next choice of all rows.
        def choose(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            logit, choice, sent, total = carry

            def next_choice(chunk: Columns, best: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                return _better(best, _first_after(logit, choice, _load(x_s, chunk), _choices(slot_E, chunk), chunk))

            nothing = (_row(-jnp.inf, jnp.float32), _row(NO_CHOICE, jnp.int32))
            logit, choice = for_chunks(next_choice, nothing)
            slot = choice & ((1 << SLOT_BITS) - 1)
            weight = jnp.exp(logit - shift)
            _store(slot_Tk.at[here, j], jnp.where(valid, slot, -1))
            choice_s[j], weight_s[j] = choice, weight
            if counting:
                rank = lax.div(slot, jnp.int32(experts // ranks)) + columns
                sent = jnp.where(_iota(on_ranks, 1) == _spread(rank, on_ranks), 1.0, sent)
            return logit, choice, sent, total + weight if renormalise else total

        nothing_sent = plgpu.layout_cast(jnp.zeros((BLOCK, rank_columns), jnp.float32), MATRIX)
        before_all = (_row(jnp.inf, jnp.float32), _row(-1, jnp.int32), nothing_sent, total)
        last_logit, last_choice, sent, total = lax.fori_loop(0, k, choose, before_all)

        def mark(part: Columns, marks: jax.Array, counts: Ref) -> None:
            marks = jnp.where(_spread(valid, part), marks, 0.0)
            marks_s[:, part] = marks.astype(jnp.bfloat16)
            _store(counts, jnp.sum(marks, axis=0).astype(jnp.int32))

        # A column is chosen if it comes before the last choice in the order, or is the last choice.
        def mark_chosen(chunk: Columns, _: None) -> None:
            x, logit = _load(x_s, chunk), _spread(last_logit, chunk)
            tied = (x == logit) & (_choices(slot_E, chunk) <= _spread(last_choice, chunk))
            mark(chunk, jnp.where((x > logit) | tied, 1.0, 0.0), count_BE.at[block, chunk])

        def count_earlier(chunk: Columns, _: None) -> None:
            x_s[:, chunk] = _earlier(below_s, marks_s, chunk)  # the logits are not needed any more

        if counting:
            for_chunks(mark_chosen, None)
            mark(on_ranks, sent, send_BR.at[block])
            # The products read the marks of all warps. The interpreter would not detect a missing commit.
            plgpu.commit_smem()

            sent = jnp.where(_spread(valid, on_ranks), sent, 0.0)
            place = jnp.where(sent > 0, _earlier(below_s, marks_s, on_ranks), -1.0)
            _store(place_TR.at[here], place.astype(jnp.int32))
            for_chunks(count_earlier, None)

        # Last passes: the position of each choice, packed with its expert into one number, and the weights.
        def place_choice(j: jax.Array, _: None) -> None:
            choice = plgpu.load(choice_s.at[j], layout=ROW)

            def find(chunk: Columns, position: jax.Array) -> jax.Array:
                chosen = _choices(slot_E, chunk) == _spread(choice, chunk)
                return position + jnp.sum(jnp.where(chosen, _load(x_s, chunk), 0.0), axis=1)

            if counting:
                position = for_chunks(find, _row(0.0, jnp.float32))
                packed = position.astype(jnp.int32) * MAX_EXPERTS + (choice >> SLOT_BITS)
                _store(choice_Tk.at[here, j], jnp.where(valid, packed, 0))
            weight = plgpu.load(weight_s.at[j], layout=ROW) / jnp.where(total > 0, total, 1.0)
            _store(weight_Tk.at[here, j], jnp.where(valid, weight, 0.0))

        lax.fori_loop(0, k, place_choice, None)

    by_choice = (blocks * BLOCK, k)
    slot_Tk, weight_Tk, choice_Tk, place_TR, count_BE, send_BR = plgpu.kernel(
        route_and_count,
        out_type=(
            jax.ShapeDtypeStruct(by_choice, jnp.int32),
            jax.ShapeDtypeStruct(by_choice, jnp.float32),
            jax.ShapeDtypeStruct(by_choice, jnp.int32),
            jax.ShapeDtypeStruct((blocks * BLOCK, rank_columns), jnp.int32),
            jax.ShapeDtypeStruct((blocks, columns), jnp.int32),
            jax.ShapeDtypeStruct((blocks, rank_columns), jnp.int32),
        ),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((BLOCK, columns), jnp.float32, transforms=_tiles(4)),
            plgpu.SMEM((BLOCK, columns + rank_columns), jnp.bfloat16, transforms=_tiles(2)),
            plgpu.SMEM((BLOCK, BLOCK), jnp.bfloat16, transforms=_tiles(2)),
            plgpu.SMEM((k, BLOCK), jnp.int32),
            plgpu.SMEM((k, BLOCK), jnp.float32),
            plgpu.Barrier(),
        ],
        interpret=interpret,
    )(logits_TE, valid_T, slot_E)
    choice_Tk = choice_Tk[:tokens]
    return RoutedBlocks(
        slot_Tk[:tokens],
        weight_Tk[:tokens],
        expert_Tk=choice_Tk % MAX_EXPERTS,
        position_Tk=choice_Tk // MAX_EXPERTS,
        place_TR=place_TR[:tokens, :ranks],
        count_BE=count_BE[:, :experts],
        send_BR=send_BR[:, :ranks],
    )


def _first_after(
    logit: jax.Array, choice: jax.Array, x: jax.Array, choices: jax.Array, columns: Columns
) -> tuple[jax.Array, ...]:
    """Return each row's first (logit, choice) in these columns after the given one; NO_CHOICE if there is none."""
    left = (x < _spread(logit, columns)) | ((x == _spread(logit, columns)) & (choices > _spread(choice, columns)))
    top = jnp.max(jnp.where(left, x, -jnp.inf), axis=1)
    return top, jnp.min(jnp.where(left & (x == _spread(top, columns)), choices, NO_CHOICE), axis=1)


def _better(earlier: tuple[jax.Array, ...], later: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Return the first in order of two (logit, choice); ``earlier`` is from columns of lower experts."""
    take = (later[0] > earlier[0]) | (earlier[1] == NO_CHOICE)
    return tuple(jnp.where(take, new, old) for new, old in zip(later, earlier, strict=True))


def _choices(slot_E: Ref, columns: Columns) -> jax.Array:
    """Return the choice of each column, in all rows."""
    expert = _iota(columns, 1)
    slot = plgpu.load(slot_E.at[columns], layout=COLUMN, optimized=False)
    return (expert << SLOT_BITS) | lax.broadcast_in_dim(slot, expert.shape, (1,))


def _earlier(below_s: Ref, marks_s: Ref, columns: Columns) -> jax.Array:
    """Return the number of marks above each place, by column, in float32."""

    def product(sums: Ref) -> jax.Array:
        plgpu.wgmma(sums, below_s, marks_s.at[:, columns])
        return sums[...]

    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((BLOCK, columns.size), jnp.float32))


def _store(to: Ref, value: jax.Array) -> None:
    """Store to device memory, in pieces of any size."""
    if hasattr(plgpu, "store"):
        plgpu.store(to, value, optimized=False)
    else:  # jax 0.11, in which each assignment may be split into pieces
        to[...] = value


def _load(matrix_s: Ref, columns: Columns) -> jax.Array:
    return plgpu.load(matrix_s.at[:, columns], layout=MATRIX)


def _iota(columns: Columns, axis: int) -> jax.Array:
    """Return the row numbers (axis 0) or column numbers (axis 1) of these columns of the block."""
    numbers = plgpu.broadcasted_iota(jnp.int32, (BLOCK, columns.size), axis, layout=MATRIX)
    return numbers + columns.start if axis else numbers


def _row(value: float, dtype: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full((BLOCK,), value, dtype), ROW)


def _spread(row: jax.Array, columns: Columns) -> jax.Array:
    """Repeat the number of each row in all of these columns."""
    return lax.broadcast_in_dim(row, (BLOCK, columns.size), (0,))


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _tiles(element_bytes: int) -> tuple[Any, ...]:
    """Return the layout of a matrix in shared memory, which the copies and the products' operands require."""
    return plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(element_bytes * TILE)  # type: ignore[abstract]
