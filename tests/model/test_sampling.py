"""Sampling: the tokens that truncation keeps, the distribution of draws, and their independence of the batch."""

from dataclasses import fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gimbal_jax.config import MAX_LOGPROBS
from gimbal_jax.model.inputs import Logprobs, RareInputs, SamplingInputs
from gimbal_jax.model.sampling import _adjust, _truncate, sample
from tests.model.naive_sampling import adjusted

SOURCES, GROUPS, VOCAB, SUPPRESSED, BIASED, LENGTH = 4, 64, 37, 4, 3, 12
SHAPE = (SOURCES, GROUPS)
ROWS = SOURCES * GROUPS
jitted = jax.jit(sample)
jitted_adjust = jax.jit(_adjust)
jitted_truncate = jax.jit(_truncate, static_argnums=2)
LOGITS_V = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32)
PENALTIES = {"repetition": 1.0, "frequency": 0.0, "presence": 0.0}
UNASKED: dict[str, Any] = {
    "suppress": np.full(SUPPRESSED, -1),
    "bias_ids": np.full(BIASED, -1),
    "bias": np.zeros(BIASED),
    "allowed": np.ones(VOCAB, bool),
    "history": np.zeros(LENGTH),
    "prompt_tokens": 0,
    **PENALTIES,
}


ROW_OF_C = np.random.default_rng(7).permutation(ROWS)
"""Engine rows of the sequences."""


def rare_inputs(length: Any = LENGTH, **asked: Any) -> tuple[np.ndarray, RareInputs]:
    """Return the last tokens of sequences and these settings as ``RareInputs``.

    A setting has one value for all sequences or one per sequence, [S, G, ...]. Histories are whole here, while
    ``RareInputs`` lack the last token.
    """

    def by_sequence(name: str, none: Any) -> np.ndarray:
        value = np.asarray(asked.get(name, none))
        return np.broadcast_to(value, (*SHAPE, *value.shape[value.ndim - np.ndim(none) :]))

    s = {name: by_sequence(name, none) for name, none in UNASKED.items()}
    asks = any((s[name] != UNASKED[name]).any() for name in ("suppress", "bias_ids", "allowed", *PENALTIES))

    def rows(name: str, dtype: type) -> np.ndarray:
        return s[name].reshape(ROWS, *s[name].shape[2:]).astype(dtype)[np.argsort(ROW_OF_C)].copy()

    last_C = np.maximum(np.broadcast_to(length, SHAPE).ravel() - 1, 0)
    history_RN = rows("history", np.int32)
    history_RN = np.pad(history_RN, ((0, 0), (0, max(0, last_C.max() + 1 - history_RN.shape[1]))))
    last_token_C = history_RN[ROW_OF_C, last_C]
    history_RN[ROW_OF_C, last_C] = VOCAB - 1  # must be ignored
    packed = np.packbits(np.pad(rows("allowed", bool), ((0, 0), (0, -VOCAB % 32))), axis=-1, bitorder="little")
    return last_token_C, RareInputs(
        suppress_SRK=rows("suppress", np.int32),
        bias_ids_SRK=rows("bias_ids", np.int32),
        bias_SRK=rows("bias", np.float32),
        allowed_SRW=packed.view("<i4"),
        history_SRN=history_RN,
        prompt_tokens_SR=rows("prompt_tokens", np.int32),
        repetition_SR=rows("repetition", np.float32),
        frequency_SR=rows("frequency", np.float32),
        presence_SR=rows("presence", np.float32),
        targets_ST=np.zeros(1, np.int32),
        adjusts=np.bool_(asks),
        penalises=np.bool_(any((s[name] != none).any() for name, none in PENALTIES.items())),
        want_targets=np.False_,
    )


class Choice(NamedTuple):
    """Results of ``sample``."""

    token_SG: np.ndarray
    logprobs: Logprobs


def by_shape(array: jax.Array) -> np.ndarray:
    return np.asarray(array).reshape(*SHAPE, *array.shape[1:])


def flat(array: Any, dtype: type, *axes: int) -> np.ndarray:
    return np.broadcast_to(array, (*SHAPE, *axes)).astype(dtype).reshape(ROWS, *axes)


def adjust(logits: np.ndarray, length: Any, **asked: Any) -> np.ndarray:
    """Return the logits of all sequences with these adjustments."""
    last_token_C, rare = rare_inputs(length, **asked)
    args = flat(logits, np.float32, VOCAB), last_token_C, flat(length, np.int32), ROW_OF_C.astype(np.int32)
    return by_shape(jitted_adjust(*args, rare))


def choose(logits: np.ndarray, position: Any = LENGTH, **settings: Any) -> Choice:
    """Sample with these settings, one value for all rows or one per row, [S, G]; by default seeds differ."""
    defaults: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": np.arange(ROWS).reshape(SHAPE),
        "want_logprobs": False,
    }
    assert settings.keys() <= defaults.keys() | UNASKED.keys()
    s = defaults | settings
    asked = {name: value for name, value in settings.items() if name in UNASKED}
    last_token_C, rare = rare_inputs(position if "history" in asked else LENGTH, **asked)
    inputs = SamplingInputs(
        flat(s["temperature"], np.float32),
        flat(s["top_k"], np.int32),
        flat(s["top_p"], np.float32),
        flat(s["min_p"], np.float32),
        flat(s["seed"], np.uint32),
        flat(0 if s["want_logprobs"] else -1, np.int32),
    )
    args = flat(logits, np.float32, VOCAB), last_token_C, flat(position, np.int32), ROW_OF_C.astype(np.int32)
    token_C, logprobs = jitted(*args, inputs, rare)
    return Choice(by_shape(token_C), jax.tree.map(by_shape, logprobs))


def draws(logits: np.ndarray, steps: int, **settings: Any) -> np.ndarray:
    """Return the tokens of all rows at this many positions."""
    return np.concatenate([np.asarray(choose(logits, p, **settings).token_SG).ravel() for p in range(steps)])


def kept(
    logits_V: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[set[int], np.ndarray]:
    """Return the tokens that truncation keeps, and the sums that top-p is compared with, in float64."""
    tempered_V = logits_V.astype(np.float64) / temperature
    ids = sorted(range(len(logits_V)), key=lambda v: (-tempered_V[v], v))[: top_k or None]
    share = np.exp(tempered_V[ids] - tempered_V[ids[0]])
    share /= share.sum()
    before = np.cumsum(share) - share
    keep = [i == 0 or ((before[i] < top_p or top_p >= 1) and share[i] >= min_p * share[0]) for i in range(len(ids))]
    return {v for v, k in zip(ids, keep, strict=True) if k}, before


def test_greedy_takes_the_first_of_the_best():
    logits_SGV = np.random.default_rng(0).integers(0, 4, (*SHAPE, VOCAB)).astype(np.float32)
    np.testing.assert_array_equal(choose(logits_SGV, temperature=0).token_SG, logits_SGV.argmax(axis=-1))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_draws_follow_the_tempered_softmax(temperature):
    """Chi-square over 16,384 draws; 36 degrees of freedom exceed 78 once in 15,000 tries, and the seeds are fixed."""
    tokens = draws(LOGITS_V, 64, temperature=temperature)
    expected_V = len(tokens) * np.asarray(jax.nn.softmax(LOGITS_V / temperature), np.float64)
    assert expected_V.min() > 5
    observed_V = np.bincount(tokens, minlength=VOCAB)
    assert ((observed_V - expected_V) ** 2 / expected_V).sum() < 78


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(0, VOCAB + 5),
    st.sampled_from([0.01, 0.3, 0.7, 0.9, 0.99, 1.0]),
    st.sampled_from([0.0, 0.2, 0.7, 1.0]),
)
@settings(max_examples=50)
def test_truncation_keeps_exactly_the_right_tokens(seed, temperature, top_k, top_p, min_p):
    """The logits are so even that 2,048 draws contain every kept token."""
    logits_V = np.random.default_rng(seed).uniform(0, 0.4, VOCAB).astype(np.float32)
    want, before = kept(logits_V, temperature, top_k, top_p, min_p)
    assume(np.abs(before[1:] - top_p).min(initial=1) > 1e-5)
    assert set(draws(logits_V, 8, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)) == want


def test_top_k_cuts_ties_by_id():
    assert set(draws(np.zeros(VOCAB), 4, top_k=3)) == {0, 1, 2}


def test_suppressed_tokens_are_never_chosen():
    best = np.argsort(-LOGITS_V)
    suppress = [*best[:3], -1]
    assert not set(draws(LOGITS_V, 8, suppress=suppress)) & set(best[:3])
    assert set(draws(LOGITS_V, 1, temperature=0, suppress=suppress)) == {best[3]}
    assert set(draws(LOGITS_V, 8, top_k=1, suppress=suppress)) == {best[3]}


def mixed_settings(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "temperature": rng.choice([0, 0.7, 1.5], SHAPE),
        "top_k": rng.choice([0, 1, 5], SHAPE),
        "top_p": rng.choice([0.4, 1.0], SHAPE),
        "min_p": rng.choice([0, 0.2], SHAPE),
        "seed": rng.integers(0, 2**32, SHAPE),
    } | mixed_adjustments(rng)


def mixed_adjustments(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A third of the rows asks for nothing, and the others for anything."""
    asks = rng.random(SHAPE) < 2 / 3

    def some(name: str, values: np.ndarray) -> np.ndarray:
        here = asks & (rng.random(SHAPE) < 0.5)
        return np.where(here.reshape(*SHAPE, *[1] * (values.ndim - 2)), values, UNASKED[name])

    allowed = rng.random((*SHAPE, VOCAB)) < 0.5
    allowed[..., 0] = True
    bias_ids = rng.permuted(np.broadcast_to(np.arange(-1, VOCAB), (*SHAPE, VOCAB + 1)), axis=-1)[..., :BIASED]
    return {
        "suppress": some("suppress", rng.integers(-1, VOCAB, (*SHAPE, SUPPRESSED))),
        "bias_ids": some("bias_ids", bias_ids),
        "bias": rng.normal(scale=3, size=(*SHAPE, BIASED)),
        "allowed": some("allowed", allowed),
        "history": rng.integers(0, VOCAB // 3, (*SHAPE, LENGTH)),
        "prompt_tokens": rng.integers(0, 5, SHAPE),
        "repetition": some("repetition", rng.choice([0.5, 1.3, 2.0], SHAPE)),
        "frequency": some("frequency", rng.choice([-1.0, 0.25, 2.0], SHAPE)),
        "presence": some("presence", rng.choice([-2.0, 0.5], SHAPE)),
    }


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=10)
def test_logits_are_adjusted_as_vllm_defines_it(seed):
    """All rows of mixed batches equal a calculation for each row alone."""
    rng = np.random.default_rng(seed)
    logits_SGV, s = rng.normal(size=(*SHAPE, VOCAB)).astype(np.float32), mixed_adjustments(rng)
    length = rng.integers(5, LENGTH + 1, SHAPE)
    got = adjust(logits_SGV, length, **s)
    tokens = np.asarray(choose(logits_SGV, length, temperature=0, **s).token_SG)
    for row in np.ndindex(SHAPE):
        history, prompt = s["history"][row][: length[row]].tolist(), s["prompt_tokens"][row]
        want = adjusted(
            logits_SGV[row],
            prompt=history[:prompt],
            output=history[prompt:],
            bias={int(v): b for v, b in zip(s["bias_ids"][row], s["bias"][row], strict=True) if v >= 0},
            suppress=s["suppress"][row].tolist(),
            allowed=np.flatnonzero(s["allowed"][row]).tolist(),
            **{name: float(s[name][row]) for name in PENALTIES},
        )
        np.testing.assert_allclose(got[row], want, rtol=1e-5, atol=1e-5)
        assert tokens[row] == got[row].argmax()


def test_rows_without_adjustments_are_unchanged():
    """They are equal to the last bit, next to rows with all adjustments."""
    rng = np.random.default_rng(5)
    asks = rng.random(SHAPE) < 0.5
    logits_SGV, s = rng.normal(size=(*SHAPE, VOCAB)).astype(np.float32), mixed_adjustments(rng)
    s = {
        name: np.where(asks.reshape(*SHAPE, *[1] * (value.ndim - 2)), value, UNASKED[name]) for name, value in s.items()
    }
    got = adjust(logits_SGV, LENGTH, **s)
    np.testing.assert_array_equal(got[~asks], logits_SGV[~asks])
    assert (got != logits_SGV)[asks].any(axis=-1).mean() > 0.5


def test_a_bias_changes_only_its_own_tokens():
    """The bias changes no other row of the batch and no other token."""
    logits_SGV = np.zeros((*SHAPE, VOCAB), np.float32)
    ids = np.full((*SHAPE, BIASED), -1)
    ids[2, 3] = [VOCAB - 1, 0, -1]
    got = adjust(logits_SGV, LENGTH, bias_ids=ids, bias=[100.0, -1.5, 7.0])
    assert (got[2, 3, VOCAB - 1], got[2, 3, 0]) == (100, -1.5)
    assert np.count_nonzero(got) == 2


@pytest.mark.parametrize("prompt_tokens", [0, 1, 4999, 5000])
def test_thousands_of_occurrences_are_counted_exactly(prompt_tokens):
    """Occurrences in the prompt count as one, and each occurrence in the output counts."""
    penalties = {"repetition": 2.0, "frequency": 1.0, "presence": 10.0}
    got = adjust(np.ones(VOCAB), 5000, history=np.zeros(5000), prompt_tokens=prompt_tokens, **penalties)
    output = 5000 - prompt_tokens
    np.testing.assert_array_equal(got[..., 0], 0.5 - output - 10 * (output > 0))
    np.testing.assert_array_equal(got[..., 1:], 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf, "all -inf"])
def test_a_row_of_bad_logits_is_marked_and_changes_no_other_row(bad, temperature):
    rng = np.random.default_rng(6)
    logits_SGV, s = rng.normal(size=(*SHAPE, VOCAB)).astype(np.float32), mixed_adjustments(rng)
    logits_SGV[1, 1, : VOCAB - 1] = -np.inf  # one token is enough
    good = choose(logits_SGV, 9, temperature=temperature, top_k=5, **s)
    broken = logits_SGV.copy()
    broken[2, 5] = -np.inf if bad == "all -inf" else broken[2, 5]
    if bad != "all -inf":
        broken[2, 5, 11] = bad
    found = choose(broken, 9, temperature=temperature, top_k=5, **s)
    assert (good.token_SG >= 0).all()
    assert np.argwhere(found.token_SG == -1).tolist() == [[2, 5]]
    others = np.ones(SHAPE, bool)
    others[2, 5] = False
    np.testing.assert_array_equal(found.token_SG[others], good.token_SG[others])


def test_a_draw_depends_on_its_own_row_alone():
    """Rows in other places, among other rows, draw the tokens that they drew before."""
    rng = np.random.default_rng(0)
    s, logits_SGV = mixed_settings(rng), rng.normal(size=(*SHAPE, VOCAB))
    position = rng.integers(0, LENGTH + 1, SHAPE)
    before = np.asarray(choose(logits_SGV, position, **s).token_SG)
    order = rng.permutation(ROWS)

    def shuffled(array: np.ndarray) -> np.ndarray:
        return array.reshape(ROWS, *array.shape[2:])[order].reshape(array.shape)

    after = choose(shuffled(logits_SGV), shuffled(position), **{name: shuffled(value) for name, value in s.items()})
    np.testing.assert_array_equal(after.token_SG, shuffled(before))
    for row in [(0, 0), (3, 63)]:  # alone, with all other rows greedy
        alone = {name: np.zeros_like(value) + value[row] for name, value in s.items()}
        np.testing.assert_array_equal(choose(logits_SGV[row], position[row], **alone).token_SG, before[row])


def test_greedy_rows_among_sampled_ones_stay_greedy():
    rng = np.random.default_rng(1)
    logits_SGV, temperature = rng.normal(size=(*SHAPE, VOCAB)), rng.choice([0, 5.0], SHAPE)
    got, best = np.asarray(choose(logits_SGV, temperature=temperature).token_SG), logits_SGV.argmax(axis=-1)
    np.testing.assert_array_equal(got[temperature == 0], best[temperature == 0])
    assert (got != best)[temperature > 0].mean() > 0.5


def test_equal_seeds_and_positions_give_equal_tokens():
    first, again = (np.asarray(choose(LOGITS_V, 7, seed=5).token_SG) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert len(set(first.ravel())) == 1
    assert len(set(draws(LOGITS_V, 32, seed=5))) > 5
    assert len(set(np.asarray(choose(LOGITS_V, 7).token_SG).ravel())) > 5
    largest = choose(LOGITS_V, 7, seed=2**32 - 1).token_SG
    np.testing.assert_array_equal(largest, choose(LOGITS_V, 7, seed=2**32 - 1).token_SG)


@pytest.mark.parametrize("other", [{"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.9}], ids=str)
def test_truncation_of_other_rows_does_not_change_a_draw(other):
    here = np.zeros(SHAPE, bool)
    here[:, ::2] = True
    (name, value), neutral = next(iter(other.items())), {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    plain = np.asarray(choose(LOGITS_V).token_SG)
    among = np.asarray(choose(LOGITS_V, **{name: np.where(here, neutral[name], value)}).token_SG)
    np.testing.assert_array_equal(among[here], plain[here])
    assert (among[~here] != plain[~here]).any()


def test_top_p_1_keeps_tokens_beyond_the_rounding_of_the_sum():
    """With one token far ahead, the float32 sum is 1 before the last token. The logits show it, draws do not."""
    logits_CV = np.full((1, VOCAB), -17.1, np.float32)
    logits_CV[..., 0] = 0
    row = {"top_k_SC": 0, "top_p_SC": 1.0, "min_p_SC": 0.0}
    blank = {f.name: None for f in fields(SamplingInputs)}
    inputs = SamplingInputs(**blank | {name: jnp.full(1, value) for name, value in row.items()})
    np.testing.assert_array_equal(jitted_truncate(jnp.asarray(logits_CV), inputs, VOCAB), logits_CV)


@pytest.mark.parametrize("few", [5, 20, 64])
def test_a_small_top_k_keeps_the_same_tokens_as_a_full_sort(few):
    """Some logits are tied; the lower id takes precedence."""
    rng, rows, vocab = np.random.default_rng(few), 200, 500
    logits_CV = jnp.asarray(rng.integers(0, 40, (rows, vocab)) / 8, jnp.float32)
    top_k, top_p, min_p = rng.integers(1, few + 1, rows), rng.choice([0.3, 0.9, 1.0], rows), rng.choice([0, 0.3], rows)
    zeros = np.zeros(rows, np.int32)
    inputs = SamplingInputs(
        zeros, top_k.astype(np.int32), top_p.astype(np.float32), min_p.astype(np.float32), zeros, zeros
    )
    few_kept, all_kept = (np.asarray(jitted_truncate(logits_CV, inputs, most)) for most in (few, vocab))
    np.testing.assert_array_equal(few_kept, all_kept)
    assert 1 < np.isfinite(few_kept).sum(axis=1).max() <= few


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_log_probabilities_are_of_the_model_itself(temperature):
    """No setting of a request changes the reported log probabilities."""
    rng = np.random.default_rng(2)
    logits_SGV = rng.normal(size=(*SHAPE, VOCAB)).astype(np.float32)
    others = {"top_k": 3, "suppress": [1, 2, -1, -1], "bias_ids": [4, 5, -1], "bias": [2.0] * 3, "repetition": 1.5}
    out = choose(logits_SGV, temperature=temperature, want_logprobs=True, **others)
    exact = logits_SGV.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    ids = np.argsort(-exact, axis=-1, kind="stable")[..., :MAX_LOGPROBS]
    np.testing.assert_array_equal(out.logprobs.top_ids, ids)
    np.testing.assert_allclose(out.logprobs.top_values, np.take_along_axis(exact, ids, -1), atol=1e-5)
    chosen = np.take_along_axis(exact, np.asarray(out.token_SG)[..., None], -1)[..., 0]
    np.testing.assert_allclose(out.logprobs.chosen, chosen, atol=1e-5)


def test_log_probabilities_are_zero_unless_wanted():
    out = choose(LOGITS_V)
    assert not np.asarray(out.logprobs.chosen).any() and not np.asarray(out.logprobs.top_values).any()
