"""Feed-forward of many experts over few tokens each, without a dense product.

The caller knows the place of each (token, choice) pair among this rank's pairs in slot order, so nothing is sorted
here.

- On Hopper, rows are gathered into slot order and multiplied by tokamax's grouped product. A loop computes one chunk
  after the other, for as many chunks as are in use.
- In plain XLA, one batched product takes the first rows of every slot, up to a quarter more than the average load. A
  loop then computes the other rows, tile by tile.
- In plain XLA with few tokens, a loop over the slots in use computes all tokens for each of them.

Each form computes any load.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gimbal_jax.pallas_kernels.backend import Backend
from gimbal_jax.pallas_kernels.product import PARTS, product, product_of_parts, split

TILE = 8
"""The XLA form gives each slot a multiple of this many rows; few, so that a slot with one token wastes little."""
LARGEST_TILE = 32
"""Most rows of a tile in the XLA form. On a CPU 16, 32 and 64 take equal times within 5 %, with 32 to 544 tokens."""
SLOTS_AT_ONCE = 8
"""Slots of one product in a loop of the XLA form. XLA copies their weights. On a CPU 2, 4 and 8 take equal times within
15 % for 1 to 4 tokens. For tiles of 544 tokens, 8 takes 0.95 times as long as 1."""
FEW_SLOTS = 0.5
"""Pairs per slot up to which a loop over the slots in use takes less time than one product that reads all weights."""
ALWAYS_ONE_CHUNK = 8192
"""Rows up to which there is only one chunk, because on a GPU each turn of a loop waits for the host."""

Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Grouped product: rows in slot order [C, K], weights [P, K, F], rows of each slot [P] -> [C, F]. Rows past those of
the last slot are undefined."""


def swiglu(gate_up: jax.Array) -> jax.Array:
    """Return silu(gate) * up, computed in float32; the last axis holds gate, then up."""
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
    """Compute ``grouped_ffn`` as a dense product over all slots; the specification, for tests."""
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
    """Return the weighted sum over each token's slots of down(silu(gate) * up).

    The Mosaic form needs at most ``temporary_bytes`` of temporary memory, and the XLA form at most ``slots_bytes``.

    Args:
      x_ND: tokens; bfloat16 for ``mosaic``.
      place_Nk: int32 place of each pair among the pairs of this rank in slot order. The pairs of slot 0 have the places
        0 to size_P[0] - 1, those of slot 1 the next ones, and so on; each place occurs once. -1 marks pairs of other
        ranks and padding, which contribute nothing. No slot occurs twice in a row.
      weight_Nk: float32 weight of each pair.
      size_P: int32 number of pairs of each slot.
      gate_up_PDF: stacked weights, gate then up in the last axis (F = 2 * intermediate); see ``product`` for their
        type.
      down_PFD: stacked weights (F = intermediate).
      ranks: ranks over which the N * k pairs are spread. The load of an average rank fits into one chunk.
      backend: form to run.

    Returns:
      [N, D] in the type of x. Rows without a slot are 0, even if x holds NaN there.

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
    """Return the rows of a chunk: a quarter more than the average load of a rank, or all rows if they are few."""
    return min(tokens * min(k, slots), max(ALWAYS_ONE_CHUNK, -(-5 * tokens * k // (4 * ranks))))


def temporary_bytes(tokens: int, k: int, slots: int, hidden: int, intermediate: int, ranks: int) -> int:
    """Return the most bytes of temporary memory that the Mosaic form needs, in bfloat16.

    A row of a chunk needs its gate and up, and its token or its result. A token needs its sum in float32, and a pair
    two int32. The kernels' tables need 1 MiB.
    """
    row = 2 * (2 * intermediate + max(hidden, intermediate))
    return chunk_rows(tokens, k, slots, ranks) * row + tokens * 4 * hidden + tokens * k * 8 + 2**20


def slot_rows(tokens: int, k: int, slots: int, ranks: int) -> int:
    """Return the rows of each slot in the first product of the XLA form: its average load and a quarter, in tiles."""
    average = tokens * k / (slots * ranks)
    return TILE * min(-(-tokens // TILE), math.ceil(1.25 * average / TILE))


def slots_bytes(
    tokens: int, k: int, slots: int, hidden: int, intermediate: int, ranks: int, item: int, weights_item: int
) -> int:
    """Return the most bytes of temporary memory that the XLA form needs.

    A row of a slot needs its token, its gate and up, or their bfloat16 parts. A token needs two sums in float32, and
    its parts. A pair needs four int32, and for few tokens its place among all slots. The weights of some slots are
    copied.

    Args:
      tokens, k, slots, hidden, intermediate, ranks: sizes of the call.
      item: bytes of a number of the tokens.
      weights_item: bytes of a number of the weights.
    """
    row = item * (hidden + 2 * intermediate) * (1 if item == weights_item else PARTS)
    few, rows_of_slot = _is_few(tokens, k, slots, ranks), slot_rows(tokens, k, slots, ranks)
    at_once = math.gcd(slots, SLOTS_AT_ONCE) if few else _tiles_at_once(rows_of_slot, slots)
    rows = at_once * tokens if few else slots * rows_of_slot
    copies = at_once * 3 * hidden * intermediate * weights_item
    pairs = tokens * k * (16 + (5 * slots if few else 0))
    return rows * row + tokens * (8 + 2 * PARTS) * hidden + pairs + copies + 2**20


def _is_few(tokens: int, k: int, slots: int, ranks: int) -> bool:
    """Return whether a loop over the slots in use is faster than one product that reads the weights of all slots."""
    return tokens * k <= FEW_SLOTS * slots * ranks


def _tiles_at_once(rows: int, slots: int) -> int:
    """Return the tiles of one turn of the loop; one in decoding, where hardly any tile is left."""
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
    """Compute rows in slot order, one chunk after the other, for as many chunks as are in use."""
    (tokens, k), slots = place_Nk.shape, size_P.shape[0]
    most, rows = tokens * min(k, slots), chunk_rows(tokens, k, slots, ranks)
    chunks = -(-most // rows)
    end_P = jnp.cumsum(size_P)
    token_Nk = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[:, None], (tokens, k))
    # Token of each row: invert the places. Pairs without a place go past the end, where the scatter drops them.
    to_Nk = jnp.where(place_Nk >= 0, place_Nk, chunks * rows)
    token_of_row = jnp.zeros(chunks * rows, jnp.int32).at[to_Nk].set(token_Nk, mode="drop")

    def one_chunk(first: jax.Array | int) -> jax.Array:
        """Return the contribution of the chunk that begins at row ``first`` to every token, float32 [N, D]."""
        # Part of each slot's rows that lies in the chunk.
        size_here_P = jnp.clip(end_P - first, 0, rows) - jnp.clip(end_P - size_P - first, 0, rows)
        x_CD = x_ND[jax.lax.dynamic_slice_in_dim(token_of_row, first, rows)]
        y_CD = product(swiglu(product(x_CD, gate_up_PDF, size_here_P)), down_PFD, size_here_P)
        y_ND = jnp.zeros(x_ND.shape, jnp.float32)
        # Sum choice by choice, so that no array [N, k, D] is written.
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
    """Compute the grouped product with tokamax's Mosaic kernel: float32 sums, stored in the operands' type."""
    import tokamax  # here, because only installations for GPUs have it

    # Name the kernel: then tokamax raises if it cannot run, instead of using XLA's dense masked product.
    return tokamax.ragged_dot(rows_CK, weights_PKF, size_P, implementation="mosaic")


def _product_by_slot(rows_CK: jax.Array, weights_PKF: jax.Array, size_P: jax.Array) -> jax.Array:
    """Compute the grouped product on a CPU, slot by slot, with NaN in the rows that tokamax leaves undefined."""
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
    """Compute in plain XLA: one product of all slots with their first rows, then a loop over tiles of the others."""
    (tokens, k), slots = place_Nk.shape, size_P.shape[0]
    rows = slot_rows(tokens, k, slots, ranks)
    tile = min(rows, LARGEST_TILE)
    end_P = jnp.cumsum(size_P)
    first_P = end_P - size_P
    # Slot of each pair and row within the slot. Pairs without a place get a row past those of the first product.
    slot_Nk = jnp.minimum((place_Nk[..., None] >= end_P).sum(axis=-1), slots - 1)
    row_Nk = jnp.where(place_Nk >= 0, place_Nk - first_P[slot_Nk], rows)
    # Pair of each place. The rows of a slot may reach past its own places; their results are not used.
    pair_of_place = jnp.zeros(tokens * k + rows, jnp.int32)
    to_Nk = jnp.where(place_Nk >= 0, place_Nk, len(pair_of_place))
    pair_of_place = pair_of_place.at[to_Nk].set(jnp.arange(tokens * k).reshape(tokens, k), mode="drop")

    def ffn(token_BC: jax.Array, gate_up_BDF: jax.Array, down_BFD: jax.Array) -> jax.Array:
        """Return the experts' outputs for a batch of tokens each. The barriers keep XLA from recomputing values."""
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
        # Sum choice by choice, so that no array [N, k, D] is written.
        for slot_N, row_N, weight_N in zip(slot_Nk.T, row_Nk.T, weight_Nk.T, strict=True):
            here_N = row_N < rows
            y_N = y_rows[jnp.where(here_N, slot_N * rows + row_N, 0)]
            y_ND += jnp.where(here_N[:, None], y_N * weight_N[:, None], 0.0)
        return y_ND

    def add_tiles(i: jax.Array, y_ND: jax.Array) -> jax.Array:
        # Slot of each tile, and the tile's rows within the slot. Tiles past the last one compute nothing of use.
        tile_B = i * tiles_at_once + jnp.arange(tiles_at_once)
        slot_B = jnp.minimum((tile_B[:, None] >= end_tile_P).sum(axis=1), slots - 1)
        row_BC = (rows + (tile_B - first_tile_P[slot_B]) * tile)[:, None] + jnp.arange(tile)
        pair_BC = pair_of_place[first_P[slot_B][:, None] + row_BC]
        y_BCD = ffn(pair_BC // k, gate_up_PDF[slot_B], down_PFD[slot_B])
        token_BC = jnp.where(row_BC < size_P[slot_B][:, None], pair_BC // k, tokens)
        return y_ND.at[token_BC].add(y_BCD * weight_Nk.reshape(-1)[pair_BC][..., None], mode="drop")

    # Split each token once, and copy its parts to the slots that need them.
    in_parts = x_ND.dtype != gate_up_PDF.dtype
    x_rows = split(x_ND, 0).reshape(PARTS * tokens, -1) if in_parts else jax.lax.optimization_barrier(x_ND)
    tiles_at_once = _tiles_at_once(rows, slots)
    # Tiles that each slot needs after its first rows.
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
    """Compute in plain XLA for few tokens: all tokens by each slot in use, some slots at a time."""
    slots = size_P.shape[0]
    at_once = math.gcd(slots, SLOTS_AT_ONCE)
    end_P = jnp.cumsum(size_P)
    chosen_NkP = (place_Nk[..., None] >= end_P - size_P) & (place_Nk[..., None] < end_P)
    chosen_PN = chosen_NkP.any(axis=1).T
    weight_PN = jnp.where(chosen_NkP, weight_Nk[..., None], 0.0).sum(axis=1).T
    # Slots with tokens come first, so that the loop ends after them.
    used_first_P = jnp.argsort(size_P == 0, stable=True)
    x_BND = jnp.broadcast_to(x_ND, (at_once, *x_ND.shape))

    def add_slots(i: jax.Array, y_ND: jax.Array) -> jax.Array:
        slot_B = jax.lax.dynamic_slice_in_dim(used_first_P, i * at_once, at_once)
        h_BNF = swiglu(product("bnd,bdf->bnf", x_BND, gate_up_PDF[slot_B]))
        y_BND = product("bnf,bfd->bnd", h_BNF, down_PFD[slot_B]) * weight_PN[slot_B, :, None]
        return y_ND + jnp.where(chosen_PN[slot_B, :, None], y_BND, 0.0).sum(axis=0)

    turns = -(-(size_P > 0).sum() // at_once)
    return jax.lax.fori_loop(0, turns, add_slots, jnp.zeros(x_ND.shape, jnp.float32)).astype(x_ND.dtype)
