"""Options of requests on the real server, compared with a plain forward and numpy, and logits that are not finite."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from gimbal_jax.serving.engine.request import Request, SamplingParams
from tests.e2e.rig import CONFIG, FOLDER, MODEL, OnlyThese, random_requests, session
from tests.model.naive_sampling import adjusted
from tests.model.rig import Chunk
from tests.model.rig import rig as plain_rig
from tests.serving.statuses import per_engine

MARGIN = 1e-3
"""Between the best two logits, for a choice to be sure: the mesh adds up in another order than one device."""


@pytest.fixture(scope="module")
def logits_of():
    """Float32 logits [tokens, V] of a sequence, all tokens in one step of a 1 x 1 mesh."""
    one_device = plain_rig(FOLDER, 1, 1)

    def logits(tokens: list[int]) -> np.ndarray:
        return one_device.run(([], [Chunk(np.array(tokens, np.int32), 0)]))[0][0]

    return logits


ADJUSTMENTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition": {"repetition_penalty": 1.3},
    "frequency": {"frequency_penalty": 0.8},
    "presence": {"presence_penalty": 1.5},
    "bias": {"logit_bias": ((5, 8.0), (9, 7.5), (11, -50.0))},
    "all": {
        "repetition_penalty": 1.2,
        "frequency_penalty": -0.4,
        "presence_penalty": 0.5,
        "logit_bias": ((5, 2.0), (17, 3.0)),
        "min_tokens": 4,
        "stop_token_ids": (5, 17),
    },
}
ALLOWED = [*range(3, 90, 4), 5, 17]


@pytest.mark.parametrize("restricted", [False, True], ids=["any token", "a grammar"])
def test_greedy_tokens_are_those_of_a_plain_forward_and_numpy(runner, logits_of, restricted):
    """All kinds in one batch, on a 2 x 2 mesh; each token follows from what came before it."""
    rng, requests = np.random.default_rng(8), []
    for i, (name, asked) in enumerate(ADJUSTMENTS.items()):
        prompt = tuple(rng.integers(MODEL.vocab_size, size=14).tolist())
        grammar = OnlyThese(ALLOWED) if restricted else None
        params = SamplingParams(max_tokens=10, temperature=0.0, **asked)
        requests.append(Request(name, prompt, params, 0.0, i % 2, i // 2 + 1, grammar=grammar))
    with session(runner) as batched:
        tokens = batched.run(requests)
        ends = batched.ends
    changed = 0
    for request in requests:
        params, history, output = request.sampling, [*request.prompt, *tokens[request.id]], tokens[request.id]
        assert ends[request.id] in ("length", "stop")
        logits_TV = logits_of(history)
        for done, token in enumerate(output):
            logits_V = logits_TV[len(request.prompt) + done - 1]
            want_V = adjusted(
                logits_V,
                prompt=request.prompt,
                output=output[:done],
                bias=dict(params.logit_bias),
                suppress=params.stop_token_ids if done < params.min_tokens else (),
                allowed=ALLOWED if restricted else None,
                repetition=params.repetition_penalty,
                frequency=params.frequency_penalty,
                presence=params.presence_penalty,
            )
            assert want_V[token] > want_V.max() - MARGIN
            changed += logits_V.argmax() != token
    assert changed > 10


@pytest.fixture(scope="module")
def prompts():
    """Shorter and longer than a step."""
    rng = np.random.default_rng(9)
    return {str(size): tuple(rng.integers(MODEL.vocab_size, size=size).tolist()) for size in (1, 2, 8, 17, 39)}


def asking(prompts: dict[str, tuple[int, ...]], wanted: int = 3) -> list[Request]:
    params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=wanted)
    return [Request(name, prompt, params, 0.0, i % 2, i // 2 + 1) for i, (name, prompt) in enumerate(prompts.items())]


def test_log_probabilities_of_prompts_are_those_of_a_plain_forward(runner, logits_of, prompts):
    """Chunks share steps of 16 tokens on a 2 x 2 mesh, in blocks of one tile."""
    with session(runner) as batched:
        batched.run(asking(prompts))
        found = batched.prompt_logprobs
    assert found.keys() == prompts.keys() - {"1"}
    for name, logprobs in found.items():
        prompt = prompts[name]
        logprob_TV = np.asarray(jax.nn.log_softmax(logits_of(list(prompt))))[:-1]
        assert len(logprobs) == len(prompt) - 1
        for want_V, got, token in zip(logprob_TV, logprobs, prompt[1:], strict=True):
            np.testing.assert_allclose(got.chosen, want_V[token], atol=2e-4)
            np.testing.assert_allclose(got.top_values, np.sort(want_V)[::-1][:3], atol=2e-4)
            np.testing.assert_allclose(want_V[list(got.top_ids)], got.top_values, atol=2e-4)


def test_prompt_log_probabilities_do_not_depend_on_chunks_or_preemptions(runner, prompts):
    def values(**engine: int) -> dict[str, np.ndarray]:
        with session(runner, engine) as some:
            some.run(asking(prompts) + others)
            preempted.append(some.server.status().preemptions)
            return {
                name: np.array([one.chosen for one in some.prompt_logprobs[name]]) for name in prompts if name != "1"
            }

    preempted: list[int] = []
    others = [replace(one, id=f"other {one.id}") for one in random_requests(np.random.default_rng(10), 12)]
    whole, cut = values(), values(token_budget=8, num_pages=25)
    assert max(preempted) > 0
    for name in whole:
        np.testing.assert_allclose(whole[name], cut[name], atol=2e-4)


def test_logits_that_are_not_finite_fail_only_their_requests(runner, monkeypatch):
    """The embedding of one token is not a number. Other requests, also later users of its pages, do not change."""
    sick = 7
    rng = np.random.default_rng(11)
    healthy_ids = [token for token in range(MODEL.vocab_size) if token != sick]

    def request(name: str, engine: int, sequence: int, *poison: int) -> Request:
        prompt = (*rng.choice(healthy_ids, 20).tolist(), *poison, *rng.choice(healthy_ids, 3).tolist())
        params = SamplingParams(max_tokens=12, temperature=0.0, logit_bias=((sick, -100.0),), prompt_logprobs=1)
        return Request(name, prompt, params, 0.0, engine, sequence)

    healthy = [request(f"healthy {i}", i % 2, i // 2 + 1) for i in range(4)]
    ill = [request(f"ill {i}", i, 3, sick) for i in range(2)]
    after = [replace(one, id=f"after {one.id}", sequence=one.sequence + 3) for one in healthy]
    with session(runner) as well:
        expected = well.run(healthy)

    embed = runner.weights["embed"].get_value()
    ids_V1 = np.arange(MODEL.vocab_size)[:, None]
    poisoned = jax.device_put(np.where(ids_V1 == sick, np.nan, np.asarray(embed)), embed.sharding)
    weights = jax.tree.map(lambda array: poisoned if array is embed else array, runner.weights)
    monkeypatch.setattr(runner, "_leaves", jax.tree.leaves(weights))
    with session(runner) as mixed:
        found = mixed.run([healthy[0], *ill, *healthy[1:]])
        assert {name: found[name] for name in expected} == expected
        assert {name: mixed.ends[name] for name in found} == dict.fromkeys(expected, "length") | {
            one.id: "error" for one in ill
        }
        assert [found[one.id] for one in ill] == [[], []]
        assert list(mixed.run(after).values()) == list(expected.values())
        assert per_engine(mixed.server.status(), "free_pages") == (CONFIG.engine.num_pages,) * 2
