"""Log probabilities of prompts, block by block over the ranks, equal those of all logits together."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.config import MAX_LOGPROBS, MeshConfig
from gimbal_jax.model.prompt_logprobs import prompt_block, prompt_logprobs
from gimbal_jax.model.sharding import make_mesh

PLACES, HIDDEN, VOCAB = 48, 8, 64


@pytest.mark.parametrize("most_rows", [7, 1000])
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 2), (1, 4)])
def test_blocks_give_the_log_probabilities_of_all_logits(dp, tp, most_rows):
    rng = np.random.default_rng(0)
    hidden_STD = rng.normal(size=(dp, PLACES, HIDDEN)).astype(np.float32)
    table_VD = rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    targets_ST = rng.integers(0, VOCAB, (dp, PLACES)).astype(np.int32)
    mesh = make_mesh(MeshConfig(dp, tp))
    run = jax.jit(prompt_logprobs, static_argnums=(3, 4))
    found = run(hidden_STD, targets_ST, table_VD, most_rows, mesh)

    logits_STV = hidden_STD.astype(np.float64) @ table_VD.T.astype(np.float64)
    exact_STV = logits_STV - np.log(np.exp(logits_STV).sum(axis=-1, keepdims=True))
    ids_STK = np.argsort(-exact_STV, axis=-1)[..., :MAX_LOGPROBS]
    np.testing.assert_array_equal(found.top_ids, ids_STK)
    np.testing.assert_allclose(found.top_values, np.take_along_axis(exact_STV, ids_STK, -1), atol=1e-4)
    chosen_ST = np.take_along_axis(exact_STV, targets_ST[..., None], -1)[..., 0]
    np.testing.assert_allclose(found.chosen, chosen_ST, atol=1e-4)


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 40), st.integers(1, 300))
def test_blocks_and_shares_are_equal_and_no_larger_than_allowed(tp, shares, more):
    places, most = tp * shares, tp - 1 + more
    block = prompt_block(places, most, tp)
    assert block <= most
    assert places % block == block % tp == 0
    assert not any(places % n == n % tp == 0 for n in range(block + 1, most + 1))
