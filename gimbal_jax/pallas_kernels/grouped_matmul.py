"""Feed-forward of many experts over few tokens each, without a dense product.

The caller knows each (token, choice) pair's place among this rank's pairs in slot
order (see ``gimbal_jax.model.moe``), so nothing is sorted here. On Hopper and newer
the rows are gathered into slot order and multiplied by tokamax's grouped product,
chunk by chunk: those in use and no others. Elsewhere one batched product takes the
first rows of every slot, as many as are usual, and a loop visits tiles of the rows
that are left; few tokens all go through each slot in use instead. All compute any load.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gimbal_jax.pallas_kernels.backend import Backend
from gimbal_jax.pallas_kernels.product import PARTS, product, product_of_parts, split

TILE = 8
"""Rows of a slot come in multiples of this in the XLA form: few enough that a slot with one token wastes little."""
LARGEST_TILE = 32
"""Most rows of a tile there. On a CPU 16, 32 and 64 take the same time within 5 %, with 32 to 544 tokens."""
SLOTS_AT_ONCE = 8
"""Slots whose weights are copied for a product in a loop there, as XLA does not take them from where they are. On a CPU
2, 4 and 8 take the same time within 15 % for 1 to 4 tokens, and 8 takes 0.95 times that of 1 for tiles of 544."""
FEW_SLOTS = 0.5
"""Pairs for each slot up to which a loop over the slots in use takes less time than one product that reads all."""
ALWAYS_ONE_CHUNK = 8192
"""Rows up to which one chunk is enough: on a GPU each turn of a loop waits for the host."""

Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Rows in slot order [C, K], weights [P, K, F], rows of each slot [P] -> [C, F]; rows beyond the last slot's are
undefined."""


def swiglu(gate_up: jax.Array) -> jax.Array:
    """silu(gate) * up in float32, where the last axis holds gate then up."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


def grouped_ffn_reference(
    x_ND: jax.Array,
    place_Nk: jax.Array,
    weight_Nk: jax.Array,
    size_P: jax.Array,
    gate_up_PDF: jax.Array,
    down_PFD: jax.Array,
) -> jax.Array:
    """What ``grouped_ffn`` means, as a dense product over all slots; for tests."""
    end_P = jnp.cumsum(size_P)
    chosen_NkP = (place_Nk[..., None] >= end_P - size_P) & (place_Nk[..., None] < end_P)
    weight_NP = jnp.where(chosen_NkP, weight_Nk[..., None], 0.0).sum(axis=1)
    y_NPD = jnp.einsum("npf,pfd->npd", swiglu(jnp.einsum("nd,pdf->npf", x_ND, gate_up_PDF)), down_PFD)
    y_NPD = jnp.where(chosen_NkP.any(axis=1)[..., None], y_NPD * weight_NP[..., None], 0.0)
    return y_NPD.sum(axis=1).astype(x_ND.dtype)


def grouped_ffn(
    x_ND: jax.Array,
    place_Nk: jax.Array,
    weight_Nk: jax.Array,
    size_P: jax.Array,
    gate_up_PDF: jax.Array,
    down_PFD: jax.Array,
    *,
    ranks: int = 1,
    backend: Backend = "xla",
) -> jax.Array:
    """Weighted sum over each token's slots of down(silu(gate) * up).

    Temporaries of the Mosaic form: at most ``temporary_bytes``.

    Args:
      x_ND: tokens; bfloat16 for ``mosaic``.
      place_Nk: int32 place of each pair among those of this rank in slot order: the pairs of slot 0 have the places
        0 to size_P[0] - 1, those of slot 1 the next, and so on, each place once. -1 for pairs of other ranks and
        padding, which contribute nothing. No slot twice in one row.
      weight_Nk: float32 weight of each.
      size_P: int32 pairs of each slot.
      gate_up_PDF: stacked weights, gate then up in the last axis (F = 2 * intermediate); see ``product`` for their
        type.
      down_PFD: stacked weights (F = intermediate).
      ranks: over which N * k pairs are spread. The load of an average rank fits into one chunk; any load is computed.
      backend: which form to run.

    Returns:
      [N, D] in the type of x; rows without a slot are 0, whatever x holds there.

    Raises:
      ValueError: ``mosaic`` with other types than bfloat16, which tokamax's kernel does not take.
    """
    arrays = x_ND, place_Nk, weight_Nk, size_P, gate_up_PDF, down_PFD
    match backend:
        case "xla":
            tokens, k = place_Nk.shape
            few = _is_few(tokens, k, len(size_P), ranks)
            return _by_used_slots(*arrays) if few else _by_slots(*arrays, ranks)
        case "mosaic":
            if {x_ND.dtype, gate_up_PDF.dtype, down_PFD.dtype} != {jnp.dtype(jnp.bfloat16)}:
                types = f"{x_ND.dtype}, {gate_up_PDF.dtype} and {down_PFD.dtype}"
                raise ValueError(f"tokens and weights are {types}; the grouped product takes bfloat16")
            return _by_chunks(_product_by_tokamax, *arrays, ranks)
        case "interpret":
            return _by_chunks(_product_by_slot, *arrays, ranks)


def chunk_rows(tokens: int, k: int, slots: int, ranks: int) -> int:
    """Rows of a chunk: a quarter more than the average load of a rank; all rows where they are few."""
    return min(tokens * min(k, slots), max(ALWAYS_ONE_CHUNK, -(-5 * tokens * k // (4 * ranks))))


def temporary_bytes(tokens: int, k: int, slots: int, hidden: int, intermediate: int, ranks: int) -> int:
    """Most bytes that the Mosaic form takes besides its operands and result, in bfloat16.

    Per row of a chunk: its gate and up, and the token that they come from or what they give. Per token: the sum in
    float32. Per pair: two int32. And 1 MiB for the kernels' tables.
    """
    row = 2 * (2 * intermediate + max(hidden, intermediate))
    return chunk_rows(tokens, k, slots, ranks) * row + tokens * 4 * hidden + tokens * k * 8 + 2**20


def slot_rows(tokens: int, k: int, slots: int, ranks: int) -> int:
    """Rows of each slot in the first product of the XLA form: a quarter more than its average load, in tiles."""
    average = tokens * k / (slots * ranks)
    return TILE * min(-(-tokens // TILE), math.ceil(1.25 * average / TILE))


def slots_bytes(
    tokens: int, k: int, slots: int, hidden: int, intermediate: int, ranks: int, item: int, weights_item: int
) -> int:
    """Most bytes that the XLA form takes besides its operands and result, for numbers and weights of so many bytes.

    Per row of a slot: its token, its gate and up, or the parts of these. Per token: the sum in float32, twice, and its
    parts. Per pair: four int32, and for few tokens its place among all slots. And copies of the weights of some slots.
    """
    row = item * (hidden + 2 * intermediate) * (1 if item == weights_item else PARTS)
    few, rows_of_slot = _is_few(tokens, k, slots, ranks), slot_rows(tokens, k, slots, ranks)
    at_once = math.gcd(slots, SLOTS_AT_ONCE) if few else _tiles_at_once(rows_of_slot, slots)
    rows = at_once * tokens if few else slots * rows_of_slot
    copies = at_once * 3 * hidden * intermediate * weights_item
    pairs = tokens * k * (16 + (5 * slots if few else 0))
    return rows * row + tokens * (8 + 2 * PARTS) * hidden + pairs + copies + 2**20


def _is_few(tokens: int, k: int, slots: int, ranks: int) -> bool:
    """Whether a loop over the slots in use takes less time than one product that reads the weights of all."""
    return tokens * k <= FEW_SLOTS * slots * ranks


def _tiles_at_once(rows: int, slots: int) -> int:
    """Of decoding hardly any tile is left."""
    return min(slots, SLOTS_AT_ONCE) if rows > TILE else 1


def _by_chunks(
    product: Product,
    x_ND: jax.Array,
    place_Nk: jax.Array,
    weight_Nk: jax.Array,
    size_P: jax.Array,
    gate_up_PDF: jax.Array,
    down_PFD: jax.Array,
    ranks: int,
) -> jax.Array:
    """The rows in slot order, a chunk at a time, as many chunks as there are rows."""
    (tokens, k), slots = place_Nk.shape, size_P.shape[0]
    most, rows = tokens * min(k, slots), chunk_rows(tokens, k, slots, ranks)
    chunks = -(-most // rows)
    end_P = jnp.cumsum(size_P)
    token_Nk = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[:, None], (tokens, k))
    to_Nk = jnp.where(place_Nk >= 0, place_Nk, chunks * rows)
    token_of_row = jnp.zeros(chunks * rows, jnp.int32).at[to_Nk].set(token_Nk, mode="drop")

    def one_chunk(first: jax.Array | int) -> jax.Array:
        """What the rows from ``first`` on give to every token, float32 [N, D]."""
        size_here_P = jnp.clip(end_P - first, 0, rows) - jnp.clip(end_P - size_P - first, 0, rows)
        x_CD = x_ND[jax.lax.dynamic_slice_in_dim(token_of_row, first, rows)]
        y_CD = product(swiglu(product(x_CD, gate_up_PDF, size_here_P)), down_PFD, size_here_P)
        y_ND = jnp.zeros(x_ND.shape, jnp.float32)
        # Choice by choice, so that no [N, k, D] is ever written.
        for row_N, weight_N in zip((place_Nk - first).T, weight_Nk.T, strict=True):
            here_N = (row_N >= 0) & (row_N < rows)
            y_ND += jnp.where(here_N[:, None], y_CD[jnp.where(here_N, row_N, 0)] * weight_N[:, None], 0.0)
        return y_ND

    if chunks == 1:
        return one_chunk(0).astype(x_ND.dtype)

    def add_chunk(i: jax.Array, y_ND: jax.Array) -> jax.Array:
        return y_ND + one_chunk(i * rows)

    chunks_in_use = -(-end_P[-1] // rows)
    return jax.lax.fori_loop(0, chunks_in_use, add_chunk, jnp.zeros(x_ND.shape, jnp.float32)).astype(x_ND.dtype)


def _product_by_tokamax(rows_CK: jax.Array, weights_PKF: jax.Array, size_P: jax.Array) -> jax.Array:
    """tokamax's Mosaic kernel: float32 sums, stored in the operands' type."""
    import tokamax  # here: only machines with a GPU have it

    # Named, so that it raises where that kernel cannot run, instead of taking XLA's dense masked product.
    return tokamax.ragged_dot(rows_CK, weights_PKF, size_P, implementation="mosaic")


def _product_by_slot(rows_CK: jax.Array, weights_PKF: jax.Array, size_P: jax.Array) -> jax.Array:
    """The same on a CPU, slot by slot, with NaN in the rows that tokamax leaves undefined."""
    end_P = jnp.cumsum(size_P)
    row_C1 = jnp.arange(rows_CK.shape[0])[:, None]

    def one_slot(p: jax.Array, y_CF: jax.Array) -> jax.Array:
        own_C1 = (row_C1 >= end_P[p] - size_P[p]) & (row_C1 < end_P[p])
        return jnp.where(own_C1, rows_CK @ weights_PKF[p], y_CF)

    undefined = jnp.full((rows_CK.shape[0], weights_PKF.shape[2]), jnp.nan, rows_CK.dtype)
    return jax.lax.fori_loop(0, size_P.shape[0], one_slot, undefined)


def _by_slots(
    x_ND: jax.Array,
    place_Nk: jax.Array,
    weight_Nk: jax.Array,
    size_P: jax.Array,
    gate_up_PDF: jax.Array,
    down_PFD: jax.Array,
    ranks: int,
) -> jax.Array:
    """Plain XLA: one product of all slots with their first rows, then a loop over tiles of the rows that are left."""
    (tokens, k), slots = place_Nk.shape, size_P.shape[0]
    rows = slot_rows(tokens, k, slots, ranks)
    tile = min(rows, LARGEST_TILE)
    end_P = jnp.cumsum(size_P)
    first_P = end_P - size_P
    slot_Nk = jnp.minimum((place_Nk[..., None] >= end_P).sum(axis=-1), slots - 1)
    row_Nk = jnp.where(place_Nk >= 0, place_Nk - first_P[slot_Nk], rows)
    # By place. A slot's rows may reach beyond its own places: what is computed there is not used.
    pair_of_place = jnp.zeros(tokens * k + rows, jnp.int32)
    to_Nk = jnp.where(place_Nk >= 0, place_Nk, len(pair_of_place))
    pair_of_place = pair_of_place.at[to_Nk].set(jnp.arange(tokens * k).reshape(tokens, k), mode="drop")

    def ffn(token_BC: jax.Array, gate_up_BDF: jax.Array, down_BFD: jax.Array) -> jax.Array:
        """What experts make of a batch of some tokens each. The barriers keep XLA from computing anything anew."""
        if in_parts:
            x_BZCD = x_rows[jnp.arange(PARTS)[:, None] * tokens + token_BC[:, None]]
            gate_up_BCF = product_of_parts("bcd,bdf->bcf", x_BZCD, gate_up_BDF, 1)
        else:
            gate_up_BCF = product("bcd,bdf->bcf", x_rows[token_BC], gate_up_BDF)
        return jax.lax.optimization_barrier(product("bcf,bfd->bcd", swiglu(gate_up_BCF), down_BFD))

    def first_rows() -> jax.Array:
        token_PC = pair_of_place[first_P[:, None] + jnp.arange(rows)] // k
        y_rows = ffn(token_PC, gate_up_PDF, down_PFD).reshape(slots * rows, -1)
        y_ND = jnp.zeros(x_ND.shape, jnp.float32)
        # Choice by choice, so that no [N, k, D] is ever written.
        for slot_N, row_N, weight_N in zip(slot_Nk.T, row_Nk.T, weight_Nk.T, strict=True):
            here_N = row_N < rows
            y_N = y_rows[jnp.where(here_N, slot_N * rows + row_N, 0)]
            y_ND += jnp.where(here_N[:, None], y_N * weight_N[:, None], 0.0)
        return y_ND

    def add_tiles(i: jax.Array, y_ND: jax.Array) -> jax.Array:
        tile_B = i * tiles_at_once + jnp.arange(tiles_at_once)
        slot_B = jnp.minimum((tile_B[:, None] >= end_tile_P).sum(axis=1), slots - 1)
        row_BC = (rows + (tile_B - first_tile_P[slot_B]) * tile)[:, None] + jnp.arange(tile)
        pair_BC = pair_of_place[first_P[slot_B][:, None] + row_BC]
        y_BCD = ffn(pair_BC // k, gate_up_PDF[slot_B], down_PFD[slot_B])
        token_BC = jnp.where(row_BC < size_P[slot_B][:, None], pair_BC // k, tokens)
        return y_ND.at[token_BC].add(y_BCD * weight_Nk.reshape(-1)[pair_BC][..., None], mode="drop")

    # Each token is split once, and its parts are copied to where they are needed.
    in_parts = x_ND.dtype != gate_up_PDF.dtype
    x_rows = split(x_ND, 0).reshape(PARTS * tokens, -1) if in_parts else jax.lax.optimization_barrier(x_ND)
    tiles_at_once = _tiles_at_once(rows, slots)
    tiles_P = -(-jnp.maximum(size_P - rows, 0) // tile)
    end_tile_P = jnp.cumsum(tiles_P)
    first_tile_P = end_tile_P - tiles_P
    return jax.lax.fori_loop(0, -(-end_tile_P[-1] // tiles_at_once), add_tiles, first_rows()).astype(x_ND.dtype)


def _by_used_slots(
    x_ND: jax.Array,
    place_Nk: jax.Array,
    weight_Nk: jax.Array,
    size_P: jax.Array,
    gate_up_PDF: jax.Array,
    down_PFD: jax.Array,
) -> jax.Array:
    """Plain XLA for few tokens: all of them through the slots in use, some slots at a time."""
    slots = size_P.shape[0]
    at_once = math.gcd(slots, SLOTS_AT_ONCE)
    end_P = jnp.cumsum(size_P)
    chosen_NkP = (place_Nk[..., None] >= end_P - size_P) & (place_Nk[..., None] < end_P)
    chosen_PN = chosen_NkP.any(axis=1).T
    weight_PN = jnp.where(chosen_NkP, weight_Nk[..., None], 0.0).sum(axis=1).T
    used_first_P = jnp.argsort(size_P == 0, stable=True)
    x_BND = jnp.broadcast_to(x_ND, (at_once, *x_ND.shape))

    def add_slots(i: jax.Array, y_ND: jax.Array) -> jax.Array:
        slot_B = jax.lax.dynamic_slice_in_dim(used_first_P, i * at_once, at_once)
        h_BNF = swiglu(product("bnd,bdf->bnf", x_BND, gate_up_PDF[slot_B]))
        y_BND = product("bnf,bfd->bnd", h_BNF, down_PFD[slot_B]) * weight_PN[slot_B, :, None]
        return y_ND + jnp.where(chosen_PN[slot_B, :, None], y_BND, 0.0).sum(axis=0)

    turns = -(-(size_P > 0).sum() // at_once)
    return jax.lax.fori_loop(0, turns, add_slots, jnp.zeros(x_ND.shape, jnp.float32)).astype(x_ND.dtype)
