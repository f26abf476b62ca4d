"""Work of a step: counts that follow from its pairs."""

from __future__ import annotations

import numpy as np

from gimbal_jax.simulation.work import EngineWork, StepWork, token_copies_LSR

K = 8


def test_copies_to_a_rank_are_the_tokens_with_a_choice_there():
    rng = np.random.default_rng(0)
    tokens, share_R = 20_000, np.array([0.5, 0.3, 0.15, 0.05])
    chosen_NR = rng.multinomial(K, share_R, size=tokens)  # each choice falls on a rank on its own
    pairs_LSR = chosen_NR.sum(axis=0).reshape(1, 1, 4)
    expected_R = token_copies_LSR(pairs_LSR, np.array([tokens]), K)[0, 0]
    np.testing.assert_allclose(expected_R, (chosen_NR > 0).sum(axis=0), rtol=0.01)


def test_an_idle_source_sends_nothing():
    pairs_LSR = np.array([[[8, 8, 8, 8], [0, 0, 0, 0]]])
    copies = token_copies_LSR(pairs_LSR, np.array([4, 0]), K)
    assert (copies[0, 0] > 0).all() and not copies[0, 1].any()


def test_a_step_computes_its_own_copies():
    engines = tuple(EngineWork(np.full(rows, 9), (), rows) for rows in (5, 0))
    pairs_LSP = np.zeros((3, 2, 8), np.int64)
    pairs_LSP[:, 0] = 5 * K // 8
    step = StepWork(engines, pairs_LSP, ranks=4)
    np.testing.assert_array_equal(step.copies_LSR, token_copies_LSR(step.pairs_LSR, np.array([5, 0]), K))
    idle = StepWork(engines[1:] * 2, np.zeros_like(pairs_LSP), ranks=4)
    assert not idle.copies_LSR.any()
