"""Choosing tokens. A draw depends on its request's seed and position alone, never on the batch around it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gimbal_jax.config import MAX_LOGPROBS
from gimbal_jax.model.inputs import SamplingInputs, StepOutputs


def sample(logits_SGV: jax.Array, position_SG: jax.Array, s: SamplingInputs) -> StepOutputs:
    """Choose one token per group from float32 logits; ``position_SG`` is the new token's place in its sequence.

    What no row of the batch asks for (a draw, truncation, log probabilities) is
    skipped at run time. Log probabilities are of the logits as the model gave them.
    """
    token_SG = jax.lax.cond(
        s.plain, lambda: logits_SGV.argmax(axis=-1).astype(jnp.int32), lambda: _draw(logits_SGV, position_SG, s)
    )
    top = min(MAX_LOGPROBS, logits_SGV.shape[-1])

    def logprobs() -> tuple[jax.Array, jax.Array, jax.Array]:
        logprob_SGV = jax.nn.log_softmax(logits_SGV)
        values, ids = jax.lax.top_k(logprob_SGV, top)
        return jnp.take_along_axis(logprob_SGV, token_SG[..., None], axis=-1)[..., 0], ids, values

    def nothing() -> tuple[jax.Array, jax.Array, jax.Array]:
        shape = (*token_SG.shape, top)
        return jnp.zeros(token_SG.shape), jnp.zeros(shape, jnp.int32), jnp.zeros(shape)

    return StepOutputs(token_SG, *jax.lax.cond(s.want_logprobs, logprobs, nothing))


def _draw(logits_SGV: jax.Array, position_SG: jax.Array, s: SamplingInputs) -> jax.Array:
    """A Gumbel draw from the tempered logits of the kept tokens; rows at temperature 0 are greedy."""
    vocab = logits_SGV.shape[-1]
    drop_SGK = jnp.where(s.suppress_SGK < 0, vocab, s.suppress_SGK)
    suppress = jax.vmap(jax.vmap(lambda row, ids: row.at[ids].set(-jnp.inf, mode="drop")))
    logits_SGV = suppress(logits_SGV, drop_SGK)
    tempered_SGV = logits_SGV / jnp.where(s.temperature_SG > 0, s.temperature_SG, 1.0)[..., None]
    tempered_SGV = jax.lax.cond(s.truncates, lambda: _truncate(tempered_SGV, s), lambda: tempered_SGV)

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (vocab,))

    drawn_SG = (tempered_SGV + jax.vmap(jax.vmap(noise))(s.seed_SG, position_SG)).argmax(axis=-1)
    return jnp.where(s.temperature_SG > 0, drawn_SG, logits_SGV.argmax(axis=-1)).astype(jnp.int32)


def _truncate(logits_SGV: jax.Array, s: SamplingInputs) -> jax.Array:
    """-inf for all but the tokens that top-k, then top-p over what is left, and min-p keep; the best one stays."""
    vocab = logits_SGV.shape[-1]
    id_SGV = jnp.argsort(-logits_SGV, axis=-1, stable=True)
    sorted_SGV = jnp.take_along_axis(logits_SGV, id_SGV, axis=-1)
    top_k_SG = jnp.where(s.top_k_SG > 0, s.top_k_SG, vocab)
    sorted_SGV = jnp.where(jnp.arange(vocab) < top_k_SG[..., None], sorted_SGV, -jnp.inf)
    share_SGV = jax.nn.softmax(sorted_SGV, axis=-1)
    before_SGV = jnp.cumsum(share_SGV, axis=-1) - share_SGV
    # A rounded sum may reach 1 before the last token: top-p 1 must keep that one too.
    in_top_p_SGV = (before_SGV < s.top_p_SG[..., None]) | (s.top_p_SG[..., None] >= 1)
    keep_SGV = in_top_p_SGV & (share_SGV >= s.min_p_SG[..., None] * share_SGV[..., :1])
    keep_SGV = keep_SGV.at[..., 0].set(True)
    kept_SGV = jnp.where(keep_SGV, sorted_SGV, -jnp.inf)
    return jnp.put_along_axis(logits_SGV, id_SGV, kept_SGV, axis=-1, inplace=False)
