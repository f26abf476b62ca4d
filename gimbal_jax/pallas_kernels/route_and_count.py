"""Expert routing fused with source counting (paper 5.1, 6).

One pass over the router logits gives everything that the MoE exchange and the
placement need: the slots that hold each token's experts, their weights, and how
many tokens this source sent to each logical expert. The XLA form below is the
specification.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Routing(NamedTuple):
    """Where T tokens go."""

    slot_Tk: jax.Array
    """int32 slot of each chosen expert, best expert first; -1 for padding."""
    weight_Tk: jax.Array
    """float32 weight of each chosen expert; 0 for padding."""
    count_E: jax.Array
    """int32 tokens that chose each logical expert; sums to ``valid_T.sum() * k``."""


def route_and_count(
    logits_TE: jax.Array, valid_T: jax.Array, slot_of_expert_E: jax.Array, *, k: int, renormalise: bool
) -> Routing:
    """Choose k experts per token, map them to slots and count them.

    Weights are the float32 softmax over all experts, divided by the sum of the
    chosen ones if ``renormalise``. Equal logits go to the lower expert id. NaN
    counts as minus infinity, so a bad token still chooses k experts and the
    counts stay exact.

    Args:
      logits_TE: router logits, any float type.
      valid_T: bool; False marks padding, which routes and counts nowhere.
      slot_of_expert_E: int32 placement of this layer.
      k: experts per token.
      renormalise: make each token's weights sum to 1.
    """
    experts = logits_TE.shape[-1]
    logits_TE = logits_TE.astype(jnp.float32)
    logits_TE = jnp.where(jnp.isnan(logits_TE) | ~valid_T[:, None], -jnp.inf, logits_TE)
    top_T1 = logits_TE.max(axis=-1, keepdims=True)
    scaled_TE = jnp.exp(logits_TE - jnp.where(jnp.isfinite(top_T1), top_T1, 0.0))
    total_T1 = scaled_TE.sum(axis=-1, keepdims=True)

    _, expert_Tk = jax.lax.top_k(logits_TE, k)
    weight_Tk = jnp.take_along_axis(scaled_TE, expert_Tk, axis=-1)
    divisor_T1 = weight_Tk.sum(axis=-1, keepdims=True) if renormalise else total_T1
    weight_Tk = weight_Tk / jnp.where(divisor_T1 > 0, divisor_T1, 1.0)

    counted_Tk = jnp.where(valid_T[:, None], expert_Tk, experts)
    count_E = jnp.zeros(experts, jnp.int32).at[counted_Tk.reshape(-1)].add(1, mode="drop")
    slot_Tk = jnp.where(valid_T[:, None], jnp.asarray(slot_of_expert_E)[expert_Tk], -1)
    return Routing(slot_Tk, weight_Tk, count_E)
