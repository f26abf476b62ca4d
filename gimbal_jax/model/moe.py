"""The MoE exchange: tokens to the ranks that hold their experts, results back.

Both forms run inside ``shard_map`` on every rank and drop nothing. ``gather``
sends every token to every rank; ``sparse`` sends a token only to the ranks that
hold one of its experts, so only it profits from a good placement. Where ragged
all-to-all does not exist (CPU), the sparse form pads each pair to the worst case.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gimbal_jax.config import Exchange
from gimbal_jax.model.sharding import RANKS
from gimbal_jax.pallas_kernels import Routing, grouped_ffn


def moe_exchange(
    form: Exchange, x_tD: jax.Array, routing: Routing, gate_up_PDF: jax.Array, down_PFD: jax.Array
) -> jax.Array:
    """Expert outputs of this rank's own t tokens.

    Args:
      form: which exchange.
      x_tD: this rank's own tokens; no other rank holds them.
      routing: their slots, numbered over all ranks, and weights.
      gate_up_PDF: expert weights of this rank's P slots (see ``grouped_ffn``).
      down_PFD: the same.

    Returns:
      [t, D]; 0 for padding.
    """
    exchange = _gather if form == "gather" else _sparse
    return exchange(x_tD, routing.slot_Tk, routing.weight_Tk, gate_up_PDF, down_PFD)


def _gather(
    x_tD: jax.Array, slot_tk: jax.Array, weight_tk: jax.Array, gate_up: jax.Array, down: jax.Array
) -> jax.Array:
    x_ND, routing_N2k = (jax.lax.all_gather(a, RANKS, tiled=True) for a in (x_tD, _join(slot_tk, weight_tk)))
    slot_Nk, weight_Nk = _split(routing_N2k)
    local_Nk = _local_slots(slot_Nk, jax.lax.axis_index(RANKS), gate_up.shape[0])
    y_ND = grouped_ffn(x_ND, local_Nk, weight_Nk, gate_up, down)
    return jax.lax.psum_scatter(y_ND, RANKS, scatter_dimension=0, tiled=True)


def _sparse(
    x_tD: jax.Array, slot_tk: jax.Array, weight_tk: jax.Array, gate_up: jax.Array, down: jax.Array
) -> jax.Array:
    tokens, slots, ranks = x_tD.shape[0], gate_up.shape[0], jax.lax.axis_size(RANKS)
    local_Rtk = jax.vmap(_local_slots, in_axes=(None, 0, None))(slot_tk, jnp.arange(ranks), slots)
    needed_Rt = (local_Rtk >= 0).any(axis=-1)
    # Tokens for a rank stand first in its buffer, in order; the others fall outside.
    place_Rt = jnp.where(needed_Rt, jnp.cumsum(needed_Rt, axis=1) - 1, tokens)

    def pack(values_Rt: jax.Array, fill: int) -> jax.Array:
        empty = jnp.full(values_Rt.shape, fill, values_Rt.dtype)
        return jax.vmap(lambda to, place, value: to.at[place].set(value, mode="drop"))(empty, place_Rt, values_Rt)

    def send(values: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(values, RANKS, 0, 0)

    x_RtD = send(pack(jnp.broadcast_to(x_tD, (ranks, *x_tD.shape)), 0))
    routing_Rt2k = send(pack(_join(local_Rtk, jnp.broadcast_to(weight_tk, local_Rtk.shape)), -1))
    slot_nk, weight_nk = _split(routing_Rt2k.reshape(ranks * tokens, -1))
    y_RtD = send(grouped_ffn(x_RtD.reshape(ranks * tokens, -1), slot_nk, weight_nk, gate_up, down).reshape(x_RtD.shape))
    back_RtD = jax.vmap(lambda y, place: y[jnp.minimum(place, tokens - 1)])(y_RtD, place_Rt)
    return jnp.where(needed_Rt[..., None], back_RtD, 0).sum(axis=0)


def _join(slot: jax.Array, weight: jax.Array) -> jax.Array:
    """Slots and weights as one int32 array, so that one collective carries both."""
    return jnp.concatenate([slot, jax.lax.bitcast_convert_type(weight, jnp.int32)], axis=-1)


def _split(joined: jax.Array) -> tuple[jax.Array, jax.Array]:
    slot, weight = jnp.split(joined, 2, axis=-1)
    return slot, jax.lax.bitcast_convert_type(weight, jnp.float32)


def _local_slots(slot: jax.Array, rank: jax.Array, slots_per_rank: int) -> jax.Array:
    """Slots as this rank numbers its own; -1 for slots of other ranks and for padding."""
    local = slot - rank * slots_per_rank
    return jnp.where((slot >= 0) & (local >= 0) & (local < slots_per_rank), local, -1)
