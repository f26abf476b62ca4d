"""The model's logits and greedy tokens equal Hugging Face's, on all meshes and with both exchanges."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.model.rig import Chunk, rig

GOLDENS = Path(__file__).parents[1] / "goldens"
OTHER_CASES = sorted(p.name for p in GOLDENS.iterdir() if p.name != "base")
MAX_ERROR = 1e-4
SECOND_RUN = 12
"""First page of the sequence that is prefilled in chunks; the other sequence starts at page 0."""
FAST = [("base", 1, 1, "gather"), ("base", 2, 2, "gather")]
SLOW = [
    *(("base", dp, tp, "gather") for dp, tp in [(1, 2), (2, 1)]),
    *(("base", dp, tp, "sparse") for dp, tp in [(1, 2), (2, 1), (2, 2)]),
    *((case, 2, 2, "gather") for case in OTHER_CASES),
]


@pytest.mark.parametrize(
    ("case", "dp", "tp", "exchange"), [*FAST, *(pytest.param(*run, marks=pytest.mark.slow) for run in SLOW)]
)
def test_logits_and_greedy_tokens_match_transformers(case, dp, tp, exchange):
    """The last engine prefills the prompt whole, the first one in chunks; then both decode 31 steps together.

    ``base`` runs on all meshes with both exchanges, but not with the sparse one on one rank, which exchanges nothing.
    The other checkpoints differ from it in single features, none of which changes the exchange. So they run with one
    exchange and with both mesh axes split.
    """
    golden = np.load(GOLDENS / case / "golden.npz")
    prompt, tokens, expected = golden["prompt_T"], golden["tokens_N"], golden["decode_logits_NV"]
    model, last = rig(GOLDENS / case, dp, tp, exchange), dp - 1
    errors = []

    def check(logits: np.ndarray, golden_logits: np.ndarray) -> None:
        errors.append(np.abs(logits - golden_logits).max())
        assert errors[-1] <= MAX_ERROR

    def prefill(engine: int, chunk: Chunk) -> np.ndarray:
        steps: list[tuple[list[Chunk], list[Chunk]]] = [([], []) for _ in range(dp)]
        steps[engine][1].append(chunk)
        return model.run(*steps)[engine][0]

    whole = prefill(last, Chunk(prompt, 0))
    bounds = [0, 7, 24, 25, len(prompt)]
    parts = [prefill(0, Chunk(prompt[a:b], a, SECOND_RUN)) for a, b in pairwise(bounds)]
    for logits in (whole, np.concatenate(parts)):
        check(logits, golden["logits_TV"])
        assert logits[-1].argmax() == tokens[0]

    for i, token in enumerate(tokens[:-1]):
        steps: list[tuple[list[Chunk], list[Chunk]]] = [([], []) for _ in range(dp)]
        for engine, page in ((last, 0), (0, SECOND_RUN)):
            steps[engine][0].append(Chunk(np.array([token]), len(prompt) + i, page))
        out = model.run(*steps)
        for row in [row for engine in sorted({0, last}) for row in out[engine]]:
            check(row[0], expected[i + 1])
            assert row[0].argmax() == tokens[i + 1]

    computed = 2 * (len(prompt) + len(tokens) - 1)
    assert model.counts_LSE().sum() == computed * model.config.experts_per_token * len(model.config.moe_layers)
    print(f"{case} {dp}x{tp} {exchange}: max error {max(errors):.1e}")
