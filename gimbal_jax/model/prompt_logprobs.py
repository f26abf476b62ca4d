"""Log probabilities of prompt tokens: of many places at once, whose logits together would take too much memory."""

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
    """Log probabilities [S, T] of a target token after each place, and of the likeliest ones.

    Each rank computes its share of the vocabulary for a block of places, and gets the whole of it for its share of
    those. One block after the other: one all-to-all within each engine.

    Args:
      hidden_STD: final hidden states, whole on every rank of an engine; T divides by tp.
      targets_ST: int32 tokens.
      table_VD: the output head, split by vocabulary.
      most_rows: most places of a block, at least tp.
      mesh: (dp, tp).
    """
    tp, places = mesh.shape["tp"], hidden_STD.shape[1]
    share, block = places // tp, prompt_block(places, most_rows, tp) // tp

    def on_rank(own_STD: jax.Array, own_targets_St: jax.Array, own_table: jax.Array) -> Logprobs:
        hidden_RtD = own_STD.reshape(tp, share, -1)

        def of_block(first: jax.Array) -> Logprobs:
            rows_RtD = jax.lax.dynamic_slice_in_dim(hidden_RtD, first, block, axis=1)
            part = product("rtd,vd->rtv", rows_RtD, own_table, jnp.float32)
            logits_StV = jax.lax.all_to_all(part, "tp", 0, 2, tiled=True)
            return logprobs_of(logits_StV, jax.lax.dynamic_slice_in_dim(own_targets_St, first, block, axis=1))

        found = jax.lax.map(of_block, jnp.arange(0, share, block))
        return jax.tree.map(lambda array: array.reshape(1, share, *array.shape[3:]), found)

    split = jax.shard_map(
        on_rank,
        mesh=mesh,
        in_specs=(P("dp"), P("dp", "tp"), P("tp")),
        out_specs=P("dp", "tp"),
        check_vma=False,
    )
    return split(hidden_STD, targets_ST, table_VD)


def prompt_block(places: int, most: int, tp: int) -> int:
    """Places of a block: so many or a few less, so that all blocks, and all ranks' shares of them, are equal."""
    return max(n for n in range(tp, most + 1, tp) if places % n == 0)
