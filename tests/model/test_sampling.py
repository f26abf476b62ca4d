"""Choosing tokens: what is kept, how it is drawn, and that a draw depends on nothing but its own row."""

from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gimbal_jax.config import MAX_LOGPROBS
from gimbal_jax.model.inputs import SamplingInputs, StepOutputs
from gimbal_jax.model.sampling import _truncate, sample

SOURCES, GROUPS, VOCAB, SUPPRESSED = 4, 64, 24, 4
SHAPE = (SOURCES, GROUPS)
ROWS = SOURCES * GROUPS
jitted = jax.jit(sample)
LOGITS_V = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32)


def choose(logits: np.ndarray, position: Any = 0, **settings: Any) -> StepOutputs:
    """Sample with these settings, one value for all rows or one per row [S, G]; seeds differ by default."""
    defaults: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": np.arange(ROWS).reshape(SHAPE),
        "suppress": np.full((*SHAPE, SUPPRESSED), -1),
        "want_logprobs": False,
    }
    assert settings.keys() <= defaults.keys()
    s = defaults | settings

    def rows(name: str, dtype: type) -> np.ndarray:
        return np.broadcast_to(s[name], SHAPE).astype(dtype)

    temperature, top_k = rows("temperature", np.float32), rows("top_k", np.int32)
    top_p, min_p = rows("top_p", np.float32), rows("min_p", np.float32)
    suppress = np.broadcast_to(s["suppress"], (*SHAPE, SUPPRESSED)).astype(np.int32)
    inputs = SamplingInputs(
        temperature,
        top_k,
        top_p,
        min_p,
        rows("seed", np.uint32),
        suppress,
        plain=np.bool_((temperature == 0).all() and (suppress < 0).all()),
        truncates=np.bool_((top_k > 0).any() or (top_p < 1).any() or (min_p > 0).any()),
        want_logprobs=np.bool_(s["want_logprobs"]),
    )
    logits_SGV = np.broadcast_to(logits, (*SHAPE, VOCAB)).astype(np.float32)
    return jitted(logits_SGV, np.broadcast_to(position, SHAPE).astype(np.int32), inputs)


def draws(logits: np.ndarray, steps: int, **settings: Any) -> np.ndarray:
    """Tokens of all rows at this many positions."""
    return np.concatenate([np.asarray(choose(logits, p, **settings).token_SG).ravel() for p in range(steps)])


def kept(
    logits_V: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[set[int], np.ndarray]:
    """Tokens that may come, in float64, and the sums that top-p was compared with."""
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
    """Chi-square over 16,384 draws; 23 degrees of freedom exceed 60 once in 30,000 tries, and the seeds are fixed."""
    tokens = draws(LOGITS_V, 64, temperature=temperature)
    expected_V = len(tokens) * np.asarray(jax.nn.softmax(LOGITS_V / temperature), np.float64)
    assert expected_V.min() > 5
    observed_V = np.bincount(tokens, minlength=VOCAB)
    assert ((observed_V - expected_V) ** 2 / expected_V).sum() < 60


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(0, VOCAB + 5),
    st.sampled_from([0.01, 0.3, 0.7, 0.9, 0.99, 1.0]),
    st.sampled_from([0.0, 0.2, 0.7, 1.0]),
)
@settings(max_examples=50)
def test_truncation_keeps_exactly_the_right_tokens(seed, temperature, top_k, top_p, min_p):
    """The logits are so even that 2,048 draws meet every kept token."""
    logits_V = np.random.default_rng(seed).uniform(0, 0.4, VOCAB).astype(np.float32)
    want, before = kept(logits_V, temperature, top_k, top_p, min_p)
    assume(np.abs(before[1:] - top_p).min(initial=1) > 1e-5)
    assert set(draws(logits_V, 8, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)) == want


def test_top_k_cuts_ties_by_id():
    assert set(draws(np.zeros(VOCAB), 4, top_k=3)) == {0, 1, 2}


def test_suppressed_tokens_never_come():
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
        "suppress": rng.integers(-1, VOCAB, (*SHAPE, SUPPRESSED)),
    }


def test_a_draw_depends_on_its_own_row_alone():
    """Rows shuffled into other places among other rows draw what they drew before."""
    rng = np.random.default_rng(0)
    s, logits_SGV = mixed_settings(rng), rng.normal(size=(*SHAPE, VOCAB))
    position = rng.integers(0, 1000, SHAPE)
    before = np.asarray(choose(logits_SGV, position, **s).token_SG)
    order = rng.permutation(ROWS)

    def shuffled(array: np.ndarray) -> np.ndarray:
        return array.reshape(ROWS, *array.shape[2:])[order].reshape(array.shape)

    after = choose(shuffled(logits_SGV), shuffled(position), **{name: shuffled(value) for name, value in s.items()})
    np.testing.assert_array_equal(after.token_SG, shuffled(before))
    for row in [(0, 0), (3, 63)]:  # alone, with everyone else greedy
        alone = {name: np.zeros_like(value) + value[row] for name, value in s.items()}
        np.testing.assert_array_equal(choose(logits_SGV[row], position[row], **alone).token_SG, before[row])


def test_greedy_rows_among_sampled_ones_stay_greedy():
    rng = np.random.default_rng(1)
    logits_SGV, temperature = rng.normal(size=(*SHAPE, VOCAB)), rng.choice([0, 5.0], SHAPE)
    got, best = np.asarray(choose(logits_SGV, temperature=temperature).token_SG), logits_SGV.argmax(axis=-1)
    np.testing.assert_array_equal(got[temperature == 0], best[temperature == 0])
    assert (got != best)[temperature > 0].mean() > 0.5


def test_the_same_seed_and_position_give_the_same_token_and_others_do_not():
    first, again = (np.asarray(choose(LOGITS_V, 7, seed=5).token_SG) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert len(set(first.ravel())) == 1
    assert len(set(draws(LOGITS_V, 32, seed=5))) > 5
    assert len(set(np.asarray(choose(LOGITS_V, 7).token_SG).ravel())) > 5
    largest = choose(LOGITS_V, 7, seed=2**32 - 1).token_SG
    np.testing.assert_array_equal(largest, choose(LOGITS_V, 7, seed=2**32 - 1).token_SG)


@pytest.mark.parametrize("other", [{"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.9}], ids=str)
def test_a_row_that_truncates_nothing_draws_the_same_among_rows_that_do(other):
    here = np.zeros(SHAPE, bool)
    here[:, ::2] = True
    (name, value), neutral = next(iter(other.items())), {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    plain = np.asarray(choose(LOGITS_V).token_SG)
    among = np.asarray(choose(LOGITS_V, **{name: np.where(here, neutral[name], value)}).token_SG)
    np.testing.assert_array_equal(among[here], plain[here])
    assert (among[~here] != plain[~here]).any()


def test_top_p_1_keeps_tokens_beyond_the_rounding_of_the_sum():
    """With one token far ahead the float32 sum is 1 before the last token. No draw shows that; the logits do."""
    logits_SGV = np.full((1, 1, VOCAB), -17.1, np.float32)
    logits_SGV[..., 0] = 0
    row = {"top_k_SG": 0, "top_p_SG": 1.0, "min_p_SG": 0.0}
    blank = {f.name: None for f in fields(SamplingInputs)}
    inputs = SamplingInputs(**blank | {name: jnp.full((1, 1), value) for name, value in row.items()})
    np.testing.assert_array_equal(_truncate(jnp.asarray(logits_SGV), inputs), logits_SGV)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_log_probabilities_are_of_the_model_itself(temperature):
    """Temperature, truncation and suppression do not change what is reported."""
    rng = np.random.default_rng(2)
    logits_SGV = rng.normal(size=(*SHAPE, VOCAB)).astype(np.float32)
    out = choose(logits_SGV, temperature=temperature, top_k=3, suppress=[1, 2, -1, -1], want_logprobs=True)
    exact = logits_SGV.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    ids = np.argsort(-exact, axis=-1, kind="stable")[..., :MAX_LOGPROBS]
    np.testing.assert_array_equal(out.top_ids_SGK, ids)
    np.testing.assert_allclose(out.top_logprobs_SGK, np.take_along_axis(exact, ids, -1), atol=1e-5)
    chosen = np.take_along_axis(exact, np.asarray(out.token_SG)[..., None], -1)[..., 0]
    np.testing.assert_allclose(out.logprob_SG, chosen, atol=1e-5)


def test_no_log_probabilities_unless_wanted():
    out = choose(LOGITS_V)
    assert not np.asarray(out.logprob_SG).any() and not np.asarray(out.top_logprobs_SGK).any()
