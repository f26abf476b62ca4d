"""Feed-forward of many experts over few tokens each, without a dense product.

The caller knows each (token, choice) pair's place among this rank's pairs in slot
order (see ``gimbal_jax.model.moe``), so nothing is sorted here. On Hopper and newer
the rows are gathered into slot order and multiplied by tokamax's grouped product,
chunk by chunk; elsewhere a loop visits small tiles of one slot each. Both visit the
rows in use and no others, so their time follows the real load.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from gimbal_jax.pallas_kernels.backend import Backend

TILE = 8
"""Rows per tile: few enough that a slot with one token wastes little."""
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
      gate_up_PDF: stacked weights, gate then up in the last axis (F = 2 * intermediate).
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
            return _by_tiles(*arrays)
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


def _by_tiles(
    x_ND: jax.Array,
    place_Nk: jax.Array,
    weight_Nk: jax.Array,
    size_P: jax.Array,
    gate_up_PDF: jax.Array,
    down_PFD: jax.Array,
) -> jax.Array:
    """Plain XLA: the rows of each slot padded to tiles, and a loop over the tiles in use."""
    (tokens, k), slots = place_Nk.shape, size_P.shape[0]
    pairs = tokens * min(k, slots)
    max_tiles = min(pairs, pairs // TILE + slots)
    end_P = jnp.cumsum(size_P)
    tiles_P = -(-size_P // TILE)
    # How far the rows of each slot are behind their place among the tiles.
    shift_P = (jnp.cumsum(tiles_P) - tiles_P) * TILE - (end_P - size_P)
    slot_of_tile = jnp.repeat(jnp.arange(slots), tiles_P, total_repeat_length=max_tiles)

    slot_Nk = jnp.minimum((place_Nk[..., None] >= end_P).sum(axis=-1), slots - 1)
    row_Nk = jnp.where(place_Nk >= 0, place_Nk + shift_P[slot_Nk], max_tiles * TILE)
    token_Nk = jnp.broadcast_to(jnp.arange(tokens)[:, None], (tokens, k))
    token_of_row = jnp.zeros(max_tiles * TILE, jnp.int32).at[row_Nk].set(token_Nk, mode="drop")
    token_of_row = token_of_row.reshape(max_tiles, TILE)

    def one_tile(i: jax.Array, y_tiles: jax.Array) -> jax.Array:
        slot = slot_of_tile[i]
        y = swiglu(x_ND[token_of_row[i]] @ gate_up_PDF[slot]) @ down_PFD[slot]
        return jax.lax.dynamic_update_index_in_dim(y_tiles, y, i, 0)

    empty = jnp.zeros((max_tiles, TILE, x_ND.shape[1]), x_ND.dtype)
    y_rows = jax.lax.fori_loop(0, tiles_P.sum(), one_tile, empty).reshape(max_tiles * TILE, -1)
    y_NkD = y_rows[jnp.minimum(row_Nk, max_tiles * TILE - 1)]
    weighted_NkD = jnp.where(place_Nk[..., None] >= 0, y_NkD * weight_Nk[..., None], 0.0)
    return weighted_NkD.sum(axis=1).astype(x_ND.dtype)
