"""Feed-forward of many experts over few tokens each, without a dense product.

Tokens are sorted by slot and padded to tiles that each belong to one slot; the
loop visits the tiles in use and no others, so its time follows the real load.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

TILE = 8
"""Rows per tile: few enough that a slot with one token wastes little."""


def swiglu(gate_up: jax.Array) -> jax.Array:
    """silu(gate) * up, where the last axis holds gate then up."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def grouped_ffn_reference(
    x_ND: jax.Array, slot_Nk: jax.Array, weight_Nk: jax.Array, gate_up_PDF: jax.Array, down_PFD: jax.Array
) -> jax.Array:
    """What ``grouped_ffn`` means, as a dense product over all slots; for tests."""
    chosen_NkP = slot_Nk[..., None] == jnp.arange(gate_up_PDF.shape[0])
    weight_NP = jnp.where(chosen_NkP, weight_Nk[..., None], 0.0).sum(axis=1)
    y_NPD = jnp.einsum("npf,pfd->npd", swiglu(jnp.einsum("nd,pdf->npf", x_ND, gate_up_PDF)), down_PFD)
    return jnp.where(weight_NP[..., None] != 0, y_NPD * weight_NP[..., None], 0.0).sum(axis=1).astype(x_ND.dtype)


def grouped_ffn(
    x_ND: jax.Array, slot_Nk: jax.Array, weight_Nk: jax.Array, gate_up_PDF: jax.Array, down_PFD: jax.Array
) -> jax.Array:
    """Weighted sum over each token's slots of down(silu(gate) * up).

    Args:
      x_ND: tokens.
      slot_Nk: int32 local slots in [0, P), no slot twice in one row; others (-1) contribute nothing.
      weight_Nk: float32 weight of each.
      gate_up_PDF: stacked weights, gate then up in the last axis (F = 2 * intermediate).
      down_PFD: stacked weights (F = intermediate).

    Returns:
      [N, D] in the type of x; rows without a slot are 0, whatever x holds there.
    """
    (tokens, k), slots = slot_Nk.shape, gate_up_PDF.shape[0]
    pairs = tokens * k
    max_tiles = min(pairs, pairs // TILE + slots)

    slot_n = jnp.where(slot_Nk >= 0, slot_Nk, slots).reshape(-1)
    order_n = jnp.argsort(slot_n, stable=True)
    sorted_slot_n = slot_n[order_n]
    size_P = jnp.zeros(slots, jnp.int32).at[slot_n].add(1, mode="drop")
    tiles_P = -(-size_P // TILE)
    first_tile_P = jnp.cumsum(tiles_P) - tiles_P
    first_pair_P = jnp.cumsum(size_P) - size_P
    slot_of_tile = jnp.repeat(jnp.arange(slots), tiles_P, total_repeat_length=max_tiles)

    # Place of each sorted pair among the tiles; pairs without a slot fall outside.
    here_n = jnp.minimum(sorted_slot_n, slots - 1)
    place_n = first_tile_P[here_n] * TILE + jnp.arange(pairs) - first_pair_P[here_n]
    place_n = jnp.where(sorted_slot_n < slots, place_n, max_tiles * TILE)
    x_tiles = jnp.zeros((max_tiles * TILE, x_ND.shape[1]), x_ND.dtype).at[place_n].set(x_ND[order_n // k], mode="drop")
    x_tiles = x_tiles.reshape(max_tiles, TILE, -1)

    def one_tile(i: jax.Array, y_tiles: jax.Array) -> jax.Array:
        slot = slot_of_tile[i]
        y = swiglu(x_tiles[i] @ gate_up_PDF[slot]) @ down_PFD[slot]
        return jax.lax.dynamic_update_index_in_dim(y_tiles, y, i, 0)

    y_tiles = jax.lax.fori_loop(0, tiles_P.sum(), one_tile, jnp.zeros_like(x_tiles)).reshape(max_tiles * TILE, -1)
    place_Nk = jnp.zeros(pairs, jnp.int32).at[order_n].set(place_n).reshape(tokens, k)
    y_NkD = y_tiles[jnp.minimum(place_Nk, max_tiles * TILE - 1)]
    weighted_NkD = jnp.where(slot_Nk[..., None] >= 0, y_NkD * weight_Nk[..., None], 0.0)
    return weighted_NkD.sum(axis=1).astype(x_ND.dtype)
