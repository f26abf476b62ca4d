"""The model against Hugging Face's numbers, on every mesh and through both exchanges."""

from pathlib import Path

import numpy as np
import pytest

from tests.model.rig import Chunk, rig

GOLDENS = Path(__file__).parents[1] / "goldens"
CASES = sorted(p.name for p in GOLDENS.iterdir())
MAX_ERROR = 1e-4


@pytest.mark.parametrize("exchange", ["gather", "sparse"])
@pytest.mark.parametrize("dp,tp", [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_match_transformers(case, dp, tp, exchange):
    """Whole prefill on the last engine, chunked prefill on the first, then decode steps on both."""
    golden = np.load(GOLDENS / case / "golden.npz")
    prompt, tokens = golden["prompt_T"], golden["tokens_N"]
    model = rig(GOLDENS / case, dp, tp, exchange)
    idle: tuple[list[Chunk], list[Chunk]] = ([], [])
    last = dp - 1

    def on(*chunks_of_engine):
        return model.run(*chunks_of_engine)

    whole, second_page_run = Chunk(prompt, 0), 12
    steps = [idle] * dp
    steps[last] = ([], [whole])
    logits = on(*steps)[last][0]
    np.testing.assert_allclose(logits, golden["logits_TV"], atol=MAX_ERROR, rtol=0)

    chunked = []
    for start, stop in ((0, 7), (7, 24), (24, 25), (25, len(prompt))):
        steps = [idle] * dp
        steps[0] = ([], [Chunk(prompt[start:stop], start, second_page_run)])
        chunked.append(on(*steps)[0][0])
    np.testing.assert_allclose(np.concatenate(chunked), golden["logits_TV"], atol=MAX_ERROR, rtol=0)
    assert logits[-1].argmax() == chunked[-1][-1].argmax() == tokens[0]

    for i, token in enumerate(tokens[:-1]):
        steps = [([], []) for _ in range(dp)]
        for engine, page in ((last, 0), (0, second_page_run)):
            steps[engine][0].append(Chunk(np.array([token]), len(prompt) + i, page))
        out = on(*steps)
        for engine in {0, last}:
            for row in out[engine]:
                np.testing.assert_allclose(row[0], golden["decode_logits_NV"][i + 1], atol=MAX_ERROR, rtol=0)
                assert row[0].argmax() == tokens[i + 1]

    computed = 2 * (len(prompt) + len(tokens) - 1)
    assert model.counts_LSE().sum() == computed * model.config.experts_per_token * len(model.config.moe_layers)
