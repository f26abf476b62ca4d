"""Log probabilities of prompt tokens, block by block, because all logits together would need too much memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from gimbal_jax.model.inputs import Logprobs
from gimbal_jax.model.sampling import logprobs_of
from gimbal_jax.pallas_kernels import product


def prompt_logprobs(
    hidden_STD: jax.Array, targets_ST: jax.Array, table_VD: jax.Array, most_rows: int, mesh: Mesh
) -> Logprobs:
    """Return log probabilities of the target token after each place and of the likeliest tokens.

    For a block of places, each rank computes the logits of its part of the vocabulary. One all-to-all within the engine
    then gives each rank all logits of its share of these places.

    Args:
      hidden_STD: final hidden states, whole on every rank of an engine; tp divides T.
      targets_ST: int32 target tokens.
      table_VD: the output head, split by vocabulary over tp.
      most_rows: most places of a block, at least tp.
      mesh: (dp, tp).

    Returns:
      Log probabilities [S, T], and [S, T, K] of the alternatives.
    """
    tp, places = mesh.shape["tp"], hidden_STD.shape[1]
    # Places of a rank in all, and in one block.
    share, block = places // tp, prompt_block(places, most_rows, tp) // tp

    def on_rank(own_STD: jax.Array, own_targets_St: jax.Array, own_table: jax.Array) -> Logprobs:
        # Rank R of the engine gets the logits of places R * share to (R + 1) * share.
        hidden_RtD = own_STD.reshape(tp, share, -1)

        def block_logprobs(first: jax.Array) -> Logprobs:
            rows_RtD = jax.lax.dynamic_slice_in_dim(hidden_RtD, first, block, axis=1)
            part = product("rtd,vd->rtv", rows_RtD, own_table, jnp.float32)
            logits_StV = jax.lax.all_to_all(part, "tp", 0, 2, tiled=True)
            return logprobs_of(logits_StV, jax.lax.dynamic_slice_in_dim(own_targets_St, first, block, axis=1))

        by_block = jax.lax.map(block_logprobs, jnp.arange(0, share, block))
        return jax.tree.map(lambda array: array.reshape(1, share, *array.shape[3:]), by_block)

    split = jax.shard_map(
        on_rank,
        mesh=mesh,
        in_specs=(P("dp"), P("dp", "tp"), P("tp")),
        out_specs=P("dp", "tp"),
        check_vma=False,
    )
    return split(hidden_STD, targets_ST, table_VD)


def prompt_block(places: int, most: int, tp: int) -> int:
    """Return the places of a block: the largest multiple of tp up to ``most`` that divides ``places``."""
    return max(n for n in range(tp, most + 1, tp) if places % n == 0)
