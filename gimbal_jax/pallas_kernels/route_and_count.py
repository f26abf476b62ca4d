"""Expert routing fused with source counting (paper 5.1, 6).

One pass over the router logits serves the MoE exchange and the placement. It computes the slots of each token's
experts, their weights, and the tokens of this source that chose each logical expert. It also computes each pair's place
among those of its slot, and each token's place among those for a rank. So nothing must be sorted later.
``route_and_count_reference`` is the specification.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from gimbal_jax.pallas_kernels.backend import Backend
from gimbal_jax.pallas_kernels.route_and_count_mosaic import (
    BLOCK,
    MAX_EXPERTS,
    MAX_RANKS,
    RoutedBlocks,
    route_blocks,
)


class Routing(NamedTuple):
    """Routing of T tokens to k experts each, on R ranks."""

    slot_Tk: jax.Array
    """int32 slot of each chosen expert, best expert first; -1 for padding."""
    weight_Tk: jax.Array
    """float32 weight of each chosen expert; 0 for padding."""
    count_E: jax.Array
    """int32 number of tokens that chose each logical expert; the sum is ``valid_T.sum() * k``."""
    position_Tk: jax.Array
    """int32 number of earlier tokens that chose the same slot; 0 for padding."""
    send_R: jax.Array
    """int32 number of tokens with a slot on each rank."""
    place_TR: jax.Array
    """int32 number of earlier tokens with a slot on each rank; -1 if this token has none there."""


def route_and_count(
    logits_TE: jax.Array,
    valid_T: jax.Array,
    slot_of_expert_E: jax.Array,
    *,
    k: int,
    renormalise: bool,
    ranks: int = 1,
    backend: Backend = "xla",
) -> Routing:
    """Choose k experts per token, map them to slots and count them.

    Weights are the float32 softmax over all experts, divided by the sum of the chosen ones if ``renormalise``. Among
    equal logits the lower expert id comes first. NaN counts as minus infinity, so a bad token still chooses k experts
    and the counts stay exact.

    Args:
      logits_TE: router logits, any float type.
      valid_T: bool; False marks padding, which is neither routed nor counted.
      slot_of_expert_E: int32 placement of this layer, a permutation.
      k: experts per token.
      renormalise: make each token's weights sum to 1.
      ranks: R; slots 0 to E / R - 1 are on rank 0, and so on.
      backend: form to run. The kernel takes up to 512 experts and 64 ranks.

    Raises:
      ValueError: k is not in 1 to E, ranks do not divide E, or the kernel does not take so many experts or ranks.
    """
    experts = logits_TE.shape[-1]
    if not 1 <= k <= experts:
        raise ValueError(f"k: {k} is not in 1 to {experts}, the experts")
    if ranks < 1 or experts % ranks:
        raise ValueError(f"ranks: {ranks} does not divide {experts} experts")
    if backend == "xla":
        return route_and_count_reference(
            logits_TE, valid_T, slot_of_expert_E, k=k, renormalise=renormalise, ranks=ranks
        )
    if experts > MAX_EXPERTS or ranks > MAX_RANKS:
        raise ValueError(
            f"backend {backend}: {experts} experts on {ranks} ranks; the kernel takes at most "
            f"{MAX_EXPERTS} on {MAX_RANKS}"
        )
    # The interpreter also detects races, which a GPU does not report.
    interpret = plgpu.InterpretGPUParams(detect_races=True) if backend == "interpret" else None
    blocks = route_blocks(
        logits_TE, valid_T, slot_of_expert_E, k=k, renormalise=renormalise, ranks=ranks, interpret=interpret
    )
    return _join(blocks, valid_T)


def _join(blocks: RoutedBlocks, valid_T: jax.Array) -> Routing:
    """Join the blocks of the kernel: add the counts of earlier blocks to positions and places in later ones."""
    position_Tk, place_TR = blocks.position_Tk, blocks.place_TR
    if len(blocks.count_BE) > 1:
        block_T = jnp.arange(len(valid_T)) // BLOCK
        position_Tk += _earlier(blocks.count_BE)[block_T[:, None], blocks.expert_Tk]
        position_Tk = jnp.where(valid_T[:, None], position_Tk, 0)
        place_TR = jnp.where(place_TR >= 0, place_TR + _earlier(blocks.send_BR)[block_T], -1)
    count_E, send_R = blocks.count_BE.sum(axis=0), blocks.send_BR.sum(axis=0)
    return Routing(blocks.slot_Tk, blocks.weight_Tk, count_E, position_Tk, send_R, place_TR)


def route_and_count_reference(
    logits_TE: jax.Array, valid_T: jax.Array, slot_of_expert_E: jax.Array, *, k: int, renormalise: bool, ranks: int = 1
) -> Routing:
    """Compute ``route_and_count`` in plain XLA; the specification."""
    experts = logits_TE.shape[-1]
    logits_TE = logits_TE.astype(jnp.float32)
    logits_TE = jnp.where(jnp.isnan(logits_TE) | ~valid_T[:, None], -jnp.inf, logits_TE)
    logits_TE = jnp.where(logits_TE == 0, 0.0, logits_TE)  # top_k puts -0.0 after 0.0
    # Softmax by hand: a row without a finite logit has weights of 0, not NaN.
    top_T1 = logits_TE.max(axis=-1, keepdims=True)
    scaled_TE = jnp.exp(logits_TE - jnp.where(jnp.isfinite(top_T1), top_T1, 0.0))
    total_T1 = scaled_TE.sum(axis=-1, keepdims=True)

    _, expert_Tk = jax.lax.top_k(logits_TE, k)
    weight_Tk = jnp.take_along_axis(scaled_TE, expert_Tk, axis=-1)
    divisor_T1 = weight_Tk.sum(axis=-1, keepdims=True) if renormalise else total_T1
    weight_Tk = weight_Tk / jnp.where(divisor_T1 > 0, divisor_T1, 1.0)

    # Padding counts as an expert past the end, which the scatter drops.
    counted_Tk = jnp.where(valid_T[:, None], expert_Tk, experts)
    count_E = jnp.zeros(experts, jnp.int32).at[counted_Tk.reshape(-1)].add(1, mode="drop")
    slot_Tk = jnp.where(valid_T[:, None], jnp.asarray(slot_of_expert_E)[expert_Tk], -1)

    # Places are the numbers of earlier tokens with the same slot, or with a slot on the same rank.
    chosen_TP = (slot_Tk[..., None] == jnp.arange(experts)).any(axis=1)
    position_Tk = jnp.take_along_axis(_earlier(chosen_TP), jnp.maximum(slot_Tk, 0), axis=1)
    position_Tk = jnp.where(valid_T[:, None], position_Tk, 0)
    sent_TR = chosen_TP.reshape(-1, ranks, experts // ranks).any(axis=-1)
    place_TR = jnp.where(sent_TR, _earlier(sent_TR), -1)
    return Routing(slot_Tk, weight_Tk, count_E, position_Tk, sent_TR.sum(axis=0, dtype=jnp.int32), place_TR)


def _earlier(count_TX: jax.Array) -> jax.Array:
    """Return the sum of the rows above each row, by column, int32."""
    count_TX = count_TX.astype(jnp.int32)
    return jnp.cumsum(count_TX, axis=0) - count_TX
