"""The MoE exchange: it sends tokens to the ranks that hold their experts, and the results back.

Both forms run inside ``shard_map`` on each rank, and neither drops tokens. ``gather`` sends each token to all ranks.
``sparse`` sends a token once to each rank that holds one of its experts, so only ``sparse`` profits from a good
placement. A single rank exchanges nothing. The sparse form is a ragged all-to-all on CUDA. Other platforms lack that
collective, so there each pair of ranks has room for the worst case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gimbal_jax.config import Exchange
from gimbal_jax.model.sharding import RANKS
from gimbal_jax.pallas_kernels import Backend, Routing, grouped_ffn


def moe_exchange(
    form: Exchange,
    x_tD: jax.Array,
    routing: Routing,
    slot_of_expert_E: jax.Array,
    gate_up_PDF: jax.Array,
    down_PFD: jax.Array,
    backend: Backend,
) -> jax.Array:
    """Compute the expert outputs of this rank's own t tokens, with the help of the other ranks.

    Args:
      form: the exchange.
      x_tD: tokens of this rank; no other rank holds them.
      routing: their routing by ``route_and_count``, for as many ranks as there are.
      slot_of_expert_E: the placement by which they were routed.
      gate_up_PDF: expert weights of this rank's P slots (see ``grouped_ffn``).
      down_PFD: expert weights of this rank's P slots.
      backend: form of the kernels, and of the sparse exchange.

    Returns:
      [t, D] in the type of x; 0 for padding.
    """
    # Routing counts by expert; the exchange needs counts by slot.
    count_E = jnp.zeros_like(routing.count_E).at[slot_of_expert_E].set(routing.count_E)
    forms = {"gather": _gather, "sparse": _sparse}
    exchange = forms[form] if jax.lax.axis_size(RANKS) > 1 else _alone
    return exchange(x_tD, routing, count_E, gate_up_PDF, down_PFD, backend)


def first_places(count_RE: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the place of each source's first (token, choice) pair on the rank that computes the pair.

    A rank orders its pairs by slot, then by source rank.

    Args:
      count_RE: int32 pairs of each source rank for each slot.

    Returns:
      The place of each source's first pair for each slot, int32 [R, E], and the pairs of each rank's slots, [R, P].
    """
    size_RP = count_RE.sum(axis=0).reshape(count_RE.shape[0], -1)
    earlier_slots_RP = jnp.cumsum(size_RP, axis=1) - size_RP
    earlier_sources_RE = jnp.cumsum(count_RE, axis=0) - count_RE
    return earlier_slots_RP.reshape(1, -1) + earlier_sources_RE, size_RP


def _alone(
    x_tD: jax.Array,
    routing: Routing,
    count_E: jax.Array,
    gate_up_PDF: jax.Array,
    down_PFD: jax.Array,
    backend: Backend,
) -> jax.Array:
    """Compute without an exchange, for one rank. XLA would keep collectives that exchange nothing."""
    first_RE, size_RP = first_places(count_E[None])
    place_tk = first_RE[0][jnp.maximum(routing.slot_Tk, 0)] + routing.position_Tk
    place_tk = jnp.where(routing.slot_Tk >= 0, place_tk, -1)
    return grouped_ffn(x_tD, place_tk, routing.weight_Tk, size_RP[0], gate_up_PDF, down_PFD, backend=backend)


def _gather(
    x_tD: jax.Array,
    routing: Routing,
    count_E: jax.Array,
    gate_up_PDF: jax.Array,
    down_PFD: jax.Array,
    backend: Backend,
) -> jax.Array:
    """Send all tokens to all ranks, and sum the ranks' results where the tokens came from."""
    (t, k), slots = routing.slot_Tk.shape, gate_up_PDF.shape[0]
    ranks, rank = jax.lax.axis_size(RANKS), jax.lax.axis_index(RANKS)
    x_ND = jax.lax.all_gather(x_tD, RANKS, tiled=True)
    # One collective carries the whole routing. Adding the tokens to it would remove 1 of 5 collectives per layer, but
    # takes the same time.
    parts = (routing.slot_Tk, _bits(routing.weight_Tk), routing.position_Tk, count_E)
    joined = jax.lax.all_gather(jnp.concatenate([part.reshape(-1) for part in parts]), RANKS)
    slot, weight, position, count_RE = jnp.split(joined, [t * k, 2 * t * k, 3 * t * k], axis=1)
    # A pair's place is that of its source's first pair for the slot plus the source's earlier pairs for it.
    first_RE, size_RP = first_places(count_RE)
    place = jnp.take_along_axis(first_RE, jnp.maximum(slot, 0), axis=1) + position
    here = slot // slots == rank  # False for padding, whose slot is -1
    y_ND = grouped_ffn(
        x_ND,
        jnp.where(here, place, -1).reshape(-1, k),
        _floats(weight).reshape(-1, k),
        size_RP[rank],
        gate_up_PDF,
        down_PFD,
        ranks=ranks,
        backend=backend,
    )
    return jax.lax.psum_scatter(y_ND, RANKS, scatter_dimension=0, tiled=True)


def _sparse(
    x_tD: jax.Array,
    routing: Routing,
    count_E: jax.Array,
    gate_up_PDF: jax.Array,
    down_PFD: jax.Array,
    backend: Backend,
) -> jax.Array:
    """Send each token once to each rank that holds one of its experts, and sum the results that come back."""
    (t, k), slots = routing.slot_Tk.shape, gate_up_PDF.shape[0]
    ranks, rank = jax.lax.axis_size(RANKS), jax.lax.axis_index(RANKS)
    # All ranks learn how many pairs and rows each of them sends.
    counts = jax.lax.all_gather(jnp.concatenate([count_E, routing.send_R]), RANKS)
    count_RE, send_RR = jnp.split(counts, [count_E.shape[0]], axis=1)
    first_RE, size_RP = first_places(count_RE)
    place_tk = first_RE[rank][jnp.maximum(routing.slot_Tk, 0)] + routing.position_Tk
    # A row for rank R carries the places and weights of the token's pairs on R, and -1 for its other choices.
    rank_tk = routing.slot_Tk // slots  # -1 for padding
    place_tRk = jnp.where(rank_tk[:, None] == jnp.arange(ranks)[:, None], place_tk[:, None], -1)
    weight_tRk = jnp.broadcast_to(_bits(routing.weight_Tk)[:, None], place_tRk.shape)

    # The buffer holds the tokens for rank 0 first, then those for rank 1, and so on.
    rows, first_R, send, send_back = _ragged(send_RR, t, k) if backend == "mosaic" else _padded(ranks, t)
    row_tR = jnp.where(routing.place_TR >= 0, first_R + routing.place_TR, rows)
    pairs_tR = jnp.arange(t * ranks, dtype=jnp.int32).reshape(t, ranks)  # pairs of a token and a rank
    pair_of_row = jnp.full(rows, -1, jnp.int32).at[row_tR].set(pairs_tR, mode="drop")
    sent_rows = jnp.concatenate([place_tRk, weight_tRk], axis=-1).reshape(t * ranks, 2 * k)[pair_of_row]

    x_ND = send(x_tD[pair_of_row // ranks], 0)
    # Unused rows have place -1, so that the receiver ignores them.
    place_Nk, weight_Nk = jnp.split(send(jnp.where(pair_of_row[:, None] >= 0, sent_rows, -1), -1), 2, axis=-1)
    y_ND = grouped_ffn(
        x_ND, place_Nk, _floats(weight_Nk), size_RP[rank], gate_up_PDF, down_PFD, ranks=ranks, backend=backend
    )
    # Each token sums the rows that it sent, in float32.
    y_tRD = send_back(y_ND)[jnp.minimum(row_tR, rows - 1)]
    return jnp.where(routing.place_TR[..., None] >= 0, y_tRD.astype(jnp.float32), 0).sum(axis=1).astype(x_tD.dtype)


class Transport(NamedTuple):
    """A way to send rows between ranks."""

    rows: int
    """Rows of the buffer to send from."""
    first_R: jax.Array
    """First row of the buffer for each rank."""
    send: Callable[[jax.Array, int], jax.Array]
    """(buffer, fill) -> the rows that all ranks sent here; rows that nothing arrived in hold ``fill``."""
    send_back: Callable[[jax.Array], jax.Array]
    """Buffer of results in the order of arrival -> results of this rank's rows, in the order of its own buffer."""


def _ragged(send_RR: jax.Array, t: int, k: int) -> Transport:
    """Send only the rows in use. ``send_RR`` holds their number, from rank (first axis) to rank."""
    ranks, rank = send_RR.shape[0], jax.lax.axis_index(RANKS)
    first_RR = jnp.cumsum(send_RR, axis=1) - send_RR  # first row in the sender's buffer
    arrive_RR = jnp.cumsum(send_RR, axis=0) - send_RR  # first row in the receiver's buffer
    rows = t * min(k, ranks)  # a token goes to at most k ranks

    def send(buffer: jax.Array, fill: int) -> jax.Array:
        received = jnp.full((ranks * t, *buffer.shape[1:]), fill, buffer.dtype)
        where = first_RR[rank], send_RR[rank], arrive_RR[rank], send_RR[:, rank]
        return jax.lax.ragged_all_to_all(buffer, received, *where, axis_name=RANKS)

    def send_back(buffer: jax.Array) -> jax.Array:
        received = jnp.zeros((rows, *buffer.shape[1:]), buffer.dtype)
        where = arrive_RR[:, rank], send_RR[:, rank], first_RR[:, rank], send_RR[rank]
        return jax.lax.ragged_all_to_all(buffer, received, *where, axis_name=RANKS)

    return Transport(rows, first_RR[rank], send, send_back)


def _padded(ranks: int, t: int) -> Transport:
    """Send all rows. Each rank has room for all t tokens of each other rank."""

    def exchange(buffer: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(buffer, RANKS, 0, 0, tiled=True)

    return Transport(ranks * t, jnp.arange(ranks) * t, lambda buffer, fill: exchange(buffer), exchange)


def _bits(weight: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(weight, jnp.int32)


def _floats(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
