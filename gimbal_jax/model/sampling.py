"""Choosing tokens. A draw depends on its request's seed and position alone, never on the batch around it.

In vLLM's order: bias, tokens that may not come, penalties, temperature, truncation, draw. Log probabilities are of the
logits as the model gave them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gimbal_jax.config import MAX_LOGPROBS
from gimbal_jax.model.inputs import Logprobs, RareInputs, SamplingInputs

IN_PROMPT = 2**30
"""A bit above any count of output tokens."""


def sample(
    logits_SGV: jax.Array, position_SG: jax.Array, s: SamplingInputs, rare: RareInputs
) -> tuple[jax.Array, jax.Array, Logprobs]:
    """Choose one token per group from float32 logits; ``position_SG`` is the new token's place in its sequence.

    What no row of the batch asks for is skipped at run time.

    Returns:
      Tokens [S, G], whether their logits are finite, and their log probabilities.
    """
    best_SG = logits_SGV.argmax(axis=-1).astype(jnp.int32)
    # To argmax NaN is the greatest, and infinity next.
    finite_SG = jnp.isfinite(jnp.take_along_axis(logits_SGV, best_SG[..., None], axis=-1)[..., 0])

    def draw() -> jax.Array:
        adjusted_SGV = jax.lax.cond(rare.adjusts, lambda: _adjust(logits_SGV, position_SG, rare), lambda: logits_SGV)
        return _draw(adjusted_SGV, position_SG, s)

    token_SG = jax.lax.cond(s.plain, lambda: best_SG, draw)
    logprobs = jax.lax.cond(
        s.want_logprobs,
        lambda: logprobs_of(logits_SGV, token_SG),
        lambda: no_logprobs(token_SG.shape, logits_SGV.shape[-1]),
    )
    return token_SG, finite_SG, logprobs


def logprobs_of(logits: jax.Array, token: jax.Array) -> Logprobs:
    """Log probabilities of ``token`` [...] by ``logits`` [..., V], and of the likeliest in its place."""
    logprob = jax.nn.log_softmax(logits)
    top_values, top_ids = jax.lax.top_k(logprob, min(MAX_LOGPROBS, logits.shape[-1]))
    return Logprobs(jnp.take_along_axis(logprob, token[..., None], axis=-1)[..., 0], top_ids, top_values)


def no_logprobs(shape: tuple[int, ...], vocab: int) -> Logprobs:
    """Zeros of the same shapes."""
    top = (*shape, min(MAX_LOGPROBS, vocab))
    return Logprobs(jnp.zeros(shape), jnp.zeros(top, jnp.int32), jnp.zeros(top))


def _adjust(logits_SGV: jax.Array, position_SG: jax.Array, rare: RareInputs) -> jax.Array:
    """Logits with bias and penalties, and -inf for tokens that may not come."""
    groups, vocab = logits_SGV.shape[1:]
    logits_SCV = jnp.take_along_axis(logits_SGV, rare.group_SC[..., None], axis=1)
    logits_SCV = _by_row(_add)(logits_SCV, _unused_beyond(vocab, rare.bias_ids_SCK), rare.bias_SCK)
    logits_SCV = _by_row(partial(_put, values=-jnp.inf))(logits_SCV, _unused_beyond(vocab, rare.suppress_SCK))
    bit_SCW1 = (rare.allowed_SCW[..., None] >> jnp.arange(32)) & 1
    allowed_SCV = bit_SCW1.reshape(*rare.group_SC.shape, -1)[..., :vocab] == 1
    logits_SCV = jnp.where(allowed_SCV, logits_SCV, -jnp.inf)
    length_SC = jnp.take_along_axis(position_SG, rare.group_SC, axis=1)
    count_SCV = jax.lax.cond(
        rare.penalises,
        lambda: _by_row(partial(_count, vocab=vocab))(rare.history_SCN, rare.prompt_tokens_SC, length_SC),
        lambda: jnp.zeros(logits_SCV.shape, jnp.int32),
    )
    logits_SCV = _penalise(logits_SCV, count_SCV, rare)
    return jax.vmap(_put)(logits_SGV, _unused_beyond(groups, rare.group_SC), logits_SCV)


def _count(history_N: jax.Array, prompt: jax.Array, length: jax.Array, vocab: int) -> jax.Array:
    """How often the output of a sequence has each token [V], and IN_PROMPT more if its prompt has it."""
    place_N = jnp.arange(len(history_N))
    prompt_N = jnp.where(place_N < prompt, history_N, vocab)
    output_N = jnp.where((place_N >= prompt) & (place_N < length), history_N, vocab)
    return _add(_put(jnp.zeros(vocab, jnp.int32), prompt_N, IN_PROMPT), output_N, 1)


def _penalise(logits_SCV: jax.Array, count_SCV: jax.Array, rare: RareInputs) -> jax.Array:
    """vLLM's penalties: of repetition by prompt and output, of frequency and presence by the output alone."""
    output_SCV = count_SCV & (IN_PROMPT - 1)
    repetition_SCV = jnp.where(count_SCV > 0, rare.repetition_SC[..., None], 1.0)
    logits_SCV = jnp.where(logits_SCV > 0, logits_SCV / repetition_SCV, logits_SCV * repetition_SCV)
    logits_SCV -= rare.frequency_SC[..., None] * output_SCV
    return logits_SCV - rare.presence_SC[..., None] * (output_SCV > 0)


def _add(row: jax.Array, places: jax.Array, values: jax.Array | int) -> jax.Array:
    return row.at[places].add(values, mode="drop")


def _put(row: jax.Array, places: jax.Array, values: jax.Array | float) -> jax.Array:
    return row.at[places].set(values, mode="drop")


def _unused_beyond(size: int, places: jax.Array) -> jax.Array:
    """Where unused places are -1: those go beyond the end, where a scatter drops them."""
    return jnp.where(places < 0, size, places)


def _by_row(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of one row, for rows [S, ...]."""
    return jax.vmap(jax.vmap(function))


def _draw(logits_SGV: jax.Array, position_SG: jax.Array, s: SamplingInputs) -> jax.Array:
    """A Gumbel draw from the tempered logits of the kept tokens; rows at temperature 0 are greedy."""
    vocab = logits_SGV.shape[-1]
    tempered_SGV = logits_SGV / jnp.where(s.temperature_SG > 0, s.temperature_SG, 1.0)[..., None]
    tempered_SGV = jax.lax.cond(s.truncates, lambda: _truncate(tempered_SGV, s), lambda: tempered_SGV)

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (vocab,))

    drawn_SG = (tempered_SGV + _by_row(noise)(s.seed_SG, position_SG)).argmax(axis=-1)
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
