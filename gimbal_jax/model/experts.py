"""Moving expert weights between ranks while the server runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from gimbal_jax.model.sharding import RANKS


def exchange_table(
    src_slot: np.ndarray, dst_slot: np.ndarray, slots: int, ranks: int, rows_per_pair: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the moves of one round as tables of the rows that each pair of ranks exchanges.

    All moves of a round happen at the same time, so a slot may be both a source and a destination.

    Args:
      src_slot: slots whose weights move; no slot twice.
      dst_slot: the slot that each of them moves to; no slot twice.
      slots: slots of a layer, spread evenly over the ranks.
      ranks: R.
      rows_per_pair: C, the most rows from one rank to another.

    Returns:
      (send_RRC, receive_RRC) int32, both indexed by (from rank, to rank). ``send_RRC`` is the sender's local slot of
      each row. ``receive_RRC`` is the receiver's local slot for it, and one past its last slot for an unused row.

    Raises:
      ValueError: the moves need more than ``rows_per_pair`` rows between two ranks.
    """
    per_rank = slots // ranks
    send = np.zeros((ranks, ranks, rows_per_pair), np.int32)
    receive = np.full((ranks, ranks, rows_per_pair), per_rank, np.int32)
    used = np.zeros((ranks, ranks), np.int64)
    for src, dst in zip(src_slot, dst_slot, strict=True):
        pair = (src // per_rank, dst // per_rank)
        if used[pair] == rows_per_pair:
            raise ValueError(f"more than {rows_per_pair} rows from rank {pair[0]} to rank {pair[1]}")
        send[(*pair, used[pair])] = src % per_rank
        receive[(*pair, used[pair])] = dst % per_rank
        used[pair] += 1
    return send, receive


def move_experts(
    weights: tuple[jax.Array, ...], send_RRC: jax.Array, receive_RRC: jax.Array, *, mesh: Mesh
) -> tuple[jax.Array, ...]:
    """Apply the moves of ``exchange_table`` to the arrays of one layer.

    Jit it with the weights donated. Then only the moved rows are copied, through buffers of R * C rows, and the other
    rows stay in place.

    Args:
      weights: arrays of the layer whose first axis is the slot, split over the ranks.
      send_RRC: from ``exchange_table``.
      receive_RRC: from ``exchange_table``.
      mesh: (dp, tp).

    Returns:
      Arrays of the same shapes, types and shardings.
    """

    def on_rank(send: jax.Array, receive: jax.Array, *parts: jax.Array) -> tuple[jax.Array, ...]:
        rank = jax.lax.axis_index(RANKS)
        mine, theirs = send[rank], receive[:, rank].reshape(-1)

        def move(part: jax.Array) -> jax.Array:
            # All rows are read before any is written. Unused rows have a slot past the end, which the scatter drops.
            rows = jax.lax.all_to_all(part[mine], RANKS, 0, 0)
            return part.at[theirs].set(rows.reshape(-1, *part.shape[1:]), mode="drop")

        return tuple(move(part) for part in parts)

    slots = tuple(P(RANKS) for _ in weights)
    moved = jax.shard_map(on_rank, mesh=mesh, in_specs=(P(), P(), *slots), out_specs=slots, check_vma=False)
    return moved(jnp.asarray(send_RRC), jnp.asarray(receive_RRC), *weights)
