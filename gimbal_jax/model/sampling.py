"""Sampling of tokens. A draw depends only on the seed and the position of its own request, not on the batch.

The order is that of vLLM: bias, forbidden tokens, penalties, temperature, truncation, draw. Log probabilities are those
of the model's logits before all changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from gimbal_jax.config import MAX_LOGPROBS
from gimbal_jax.model.inputs import Logprobs, RareInputs, SamplingInputs

IN_PROMPT = 2**30
"""A bit above any count of output tokens, which marks tokens of the prompt."""
DRAW_ROWS = 8
"""Sequences that draw in one turn of a loop. Greedy sequences are left out, because noise and sorting are expensive.
On a CPU, one drawing sequence among 32 takes a tenth of the time of drawing for all, and 32 of them take no longer."""
FEW = 64
"""Largest top-k that is applied without a sort of the whole vocabulary."""


def sample(
    logits_CV: jax.Array,
    last_token_C: jax.Array,
    position_C: jax.Array,
    row_C: jax.Array,
    s: SamplingInputs,
    rare: RareInputs,
) -> tuple[jax.Array, Logprobs]:
    """Choose the next tokens of one engine's sequences. Work that no sequence asks for is skipped at run time.

    Args:
      logits_CV: float32 logits.
      last_token_C: int32 last token of each sequence, which the logits follow.
      position_C: int32 positions of the new tokens in their sequences.
      row_C: int32 engine row of each sequence, the index into ``rare``; R or more for unused entries.
      s: settings of the sequences, [C].
      rare: rare settings of this engine's rows, [R, ...].

    Returns:
      int32 tokens [C], -1 if the logits are not finite, and their log probabilities.
    """
    best_C, finite_C = _first_of_the_best(logits_CV)

    def draw() -> jax.Array:
        adjusted_CV = jax.lax.cond(
            rare.adjusts, lambda: _adjust(logits_CV, last_token_C, position_C, row_C, rare), lambda: logits_CV
        )
        # Bias and penalties may change the greedy tokens.
        greedy_C = jax.lax.cond(rare.adjusts, lambda: _first_of_the_best(adjusted_CV)[0], lambda: best_C)
        return _draw(adjusted_CV, greedy_C, position_C, s)

    token_C = jax.lax.cond(rare.adjusts | (s.temperature_SC > 0).any(), draw, lambda: best_C)
    logprobs = jax.lax.cond(
        (s.logprobs_SC >= 0).any(),
        lambda: logprobs_of(logits_CV, token_C),
        lambda: no_logprobs(token_C.shape, logits_CV.shape[-1]),
    )
    return jnp.where(finite_C, token_C, -1), logprobs


def _first_of_the_best(logits_CV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the lowest token of the greatest logit, 0 if that logit is not finite, and whether it is finite."""
    vocab = logits_CV.shape[-1]
    id_V = jnp.arange(vocab, dtype=jnp.int32)
    # On a CPU, two plain reductions take 0.6 times as long as an argmax. Its maximum ignores NaN, so NaN becomes inf.
    best_C = jnp.where(jnp.isnan(logits_CV), jnp.inf, logits_CV).max(axis=-1)
    finite_C = jnp.isfinite(best_C)
    first_C = jnp.where(logits_CV == best_C[..., None], id_V, vocab).min(axis=-1)
    return jnp.where(finite_C, first_C, 0), finite_C


def logprobs_of(logits: jax.Array, token: jax.Array) -> Logprobs:
    """Return log probabilities of ``token`` [...] by ``logits`` [..., V], and of the likeliest tokens."""
    logprob = jax.nn.log_softmax(logits)
    top_values, top_ids = jax.lax.top_k(logprob, min(MAX_LOGPROBS, logits.shape[-1]))
    return Logprobs(jnp.take_along_axis(logprob, token[..., None], axis=-1)[..., 0], top_ids, top_values)


def no_logprobs(shape: tuple[int, ...], vocab: int) -> Logprobs:
    """Return zeros in the shapes of ``logprobs_of``, for tokens of this shape."""
    top = (*shape, min(MAX_LOGPROBS, vocab))
    return Logprobs(jnp.zeros(shape), jnp.zeros(top, jnp.int32), jnp.zeros(top))


def _adjust(
    logits_CV: jax.Array, last_token_C: jax.Array, position_C: jax.Array, row_C: jax.Array, rare: RareInputs
) -> jax.Array:
    """Return logits with bias and penalties, and -inf for forbidden tokens. Arguments are those of ``sample``."""
    vocab = logits_CV.shape[-1]

    def of_sequences(by_row: jax.Array) -> jax.Array:
        return jnp.take(by_row, row_C, axis=0, mode="clip")

    bias_ids_CK, suppress_CK = of_sequences(rare.bias_ids_SRK), of_sequences(rare.suppress_SRK)
    logits_CV = jax.vmap(_add)(logits_CV, _unused_beyond(vocab, bias_ids_CK), of_sequences(rare.bias_SRK))
    logits_CV = jax.vmap(partial(_put, values=-jnp.inf))(logits_CV, _unused_beyond(vocab, suppress_CK))
    # Unpack the mask of allowed tokens, 32 to an element.
    bit_CW1 = (of_sequences(rare.allowed_SRW)[..., None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    allowed_CV = bit_CW1.reshape(len(row_C), -1)[:, :vocab] == 1
    logits_CV = jnp.where(allowed_CV, logits_CV, -jnp.inf)

    def penalised() -> jax.Array:
        # Histories lack the last token, which may be known on the devices only.
        history_CN = jax.vmap(_put)(of_sequences(rare.history_SRN), position_C - 1, last_token_C)
        count = jax.vmap(partial(_count, vocab=vocab))
        count_CV = count(history_CN, of_sequences(rare.prompt_tokens_SR), position_C)
        penalties = (rare.repetition_SR, rare.frequency_SR, rare.presence_SR)
        return _penalise(logits_CV, count_CV, *(of_sequences(by_row)[:, None] for by_row in penalties))

    return jax.lax.cond(rare.penalises, penalised, lambda: logits_CV)


def _count(history_N: jax.Array, prompt: jax.Array, length: jax.Array, vocab: int) -> jax.Array:
    """Count each token of the vocabulary in a sequence's output, int32 [V]; add IN_PROMPT for tokens of its prompt."""
    # Places outside the part to count get a token past the vocabulary, which the scatter drops.
    place_N = jnp.arange(len(history_N), dtype=jnp.int32)
    prompt_N = jnp.where(place_N < prompt, history_N, vocab)
    output_N = jnp.where((place_N >= prompt) & (place_N < length), history_N, vocab)
    return _add(_put(jnp.zeros(vocab, jnp.int32), prompt_N, IN_PROMPT), output_N, 1)


def _penalise(
    logits_CV: jax.Array, count_CV: jax.Array, repetition_C1: jax.Array, frequency_C1: jax.Array, presence_C1: jax.Array
) -> jax.Array:
    """Apply vLLM's penalties: repetition by prompt and output, frequency and presence by the output only."""
    output_CV = count_CV & (IN_PROMPT - 1)
    repetition_CV = jnp.where(count_CV > 0, repetition_C1, 1.0)
    logits_CV = jnp.where(logits_CV > 0, logits_CV / repetition_CV, logits_CV * repetition_CV)
    return logits_CV - frequency_C1 * output_CV - presence_C1 * (output_CV > 0)


def _add(row: jax.Array, places: jax.Array, values: jax.Array | int) -> jax.Array:
    return row.at[places].add(values, mode="drop")


def _put(row: jax.Array, places: jax.Array, values: jax.Array | float) -> jax.Array:
    return row.at[places].set(values, mode="drop")


def _unused_beyond(size: int, places: jax.Array) -> jax.Array:
    """Replace -1, which marks unused entries, by a place past the end, which a scatter drops."""
    return jnp.where(places < 0, size, places)


def _draw(logits_CV: jax.Array, greedy_C: jax.Array, position_C: jax.Array, s: SamplingInputs) -> jax.Array:
    """Draw tokens for the sequences above temperature 0; the others keep their greedy tokens.

    Each kind of truncation has its own loop. So a sequence neither pays for the truncation of others nor is rounded by
    it.
    """
    draws_C = s.temperature_SC > 0
    truncates_C = (s.top_k_SC > 0) | (s.top_p_SC < 1) | (s.min_p_SC > 0)
    few_C = (s.top_k_SC > 0) & (s.top_k_SC <= FEW)
    token_C = greedy_C
    for kind_C, truncate in (
        (~truncates_C, lambda logits_BV, own: logits_BV),
        (few_C, lambda logits_BV, own: _truncate(logits_BV, own, FEW)),
        (truncates_C & ~few_C, lambda logits_BV, own: _truncate(logits_BV, own, logits_BV.shape[-1])),
    ):
        token_C = _draw_some(draws_C & kind_C, truncate, token_C, logits_CV, position_C, s)
    return token_C


def _draw_some(
    draws_C: jax.Array,
    truncate: Callable[[jax.Array, SamplingInputs], jax.Array],
    token_C: jax.Array,
    logits_CV: jax.Array,
    position_C: jax.Array,
    s: SamplingInputs,
) -> jax.Array:
    """Return ``token_C`` with Gumbel draws for the sequences of ``draws_C`` from the logits that ``truncate`` keeps."""
    sequences, vocab = logits_CV.shape
    # Indices of the drawing sequences, padded to whole blocks with an index past the end.
    (order_C,) = jnp.nonzero(draws_C, size=-(-sequences // DRAW_ROWS) * DRAW_ROWS, fill_value=sequences)
    order_C = order_C.astype(jnp.int32)

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (vocab,), jnp.float32)

    def some(block: jax.Array, token_C: jax.Array) -> jax.Array:
        at_B = jax.lax.dynamic_slice_in_dim(order_C, block * DRAW_ROWS, DRAW_ROWS)
        logits_BV, position_B, own = jax.tree.map(
            lambda array: jnp.take(array, at_B, axis=0, mode="clip"), (logits_CV, position_C, s)
        )
        # Padding takes the last sequence, which may be greedy: avoid its division by 0.
        tempered_BV = logits_BV / jnp.where(own.temperature_SC > 0, own.temperature_SC, 1.0)[..., None]
        noisy_BV = truncate(tempered_BV, own) + jax.vmap(noise)(own.seed_SC, position_B)
        return token_C.at[at_B].set(_first_of_the_best(noisy_BV)[0], mode="drop")

    blocks = (draws_C.sum(dtype=jnp.int32) + DRAW_ROWS - 1) // DRAW_ROWS
    return jax.lax.fori_loop(0, blocks, some, token_C)


def _truncate(logits_BV: jax.Array, s: SamplingInputs, most: int) -> jax.Array:
    """Set logits to -inf except for the tokens that top-k, then top-p and min-p over the rest keep.

    The best token is always kept. No sequence's top-k is above ``most``, which is V if any keeps all tokens.
    """
    vocab = logits_BV.shape[-1]
    if most < vocab:
        sorted_BV, id_BV = jax.lax.top_k(logits_BV, most)
    else:
        id_BV = jnp.argsort(-logits_BV, axis=-1, stable=True)
        sorted_BV = jnp.take_along_axis(logits_BV, id_BV, axis=-1)
    top_k_B1 = jnp.where(s.top_k_SC > 0, s.top_k_SC, vocab)[..., None]
    # From here on, entries are in the order of falling logits.
    place_V = jnp.arange(sorted_BV.shape[-1], dtype=jnp.int32)
    sorted_BV = jnp.where(place_V < top_k_B1, sorted_BV, -jnp.inf)
    share_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(share_BV, axis=-1) - share_BV
    # A rounded sum may reach 1 before the last token, but top-p 1 must keep all tokens.
    in_top_p_BV = (before_BV < s.top_p_SC[..., None]) | (s.top_p_SC[..., None] >= 1)
    keep_BV = in_top_p_BV & (share_BV >= s.min_p_SC[..., None] * share_BV[..., :1])
    kept_BV = jnp.where(keep_BV.at[..., 0].set(True), sorted_BV, -jnp.inf)
    nothing_BV = jnp.full(logits_BV.shape, -jnp.inf, logits_BV.dtype)
    return jnp.put_along_axis(nothing_BV, id_BV, kept_BV, axis=-1, inplace=False)
