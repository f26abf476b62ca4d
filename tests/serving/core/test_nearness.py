"""The tokens that the profile learns from are exactly those whose counts it gets, and what it says is published."""

from dataclasses import replace

import numpy as np
import pytest

from gimbal_jax.config import DispatchConfig
from gimbal_jax.scheduler import affinity
from gimbal_jax.scheduler.affinity import prompt_distance_S
from tests.serving.core.ticked_server import CONFIG, open_server, request
from tests.serving.fake_server import MODEL

WITH_AFFINITY = replace(CONFIG, dispatch=DispatchConfig(affinity=True, trace_period_s=1.5))
EXPERTS, SOURCES = MODEL.num_experts, CONFIG.mesh.dp


@pytest.fixture
def lessons(monkeypatch):
    """All that the profile is given: tokens and counts."""
    given, learn = [], affinity.learn

    def note(profile, tokens_SB, counts_LSE, *more):
        given.append((tokens_SB.copy(), counts_LSE.copy()))
        return learn(profile, tokens_SB, counts_LSE, *more)

    monkeypatch.setattr(affinity, "learn", note)
    return given


@pytest.mark.parametrize("ahead", [0, 1])
def test_tokens_and_counts_are_of_the_same_steps(lessons, ahead):
    """Whatever is cancelled, preempted or not yet known to the host: the fake runner routes a token by its id."""
    rng = np.random.default_rng(ahead)
    with open_server(WITH_AFFINITY, ahead) as (server, _, _):
        now = 0
        while now < 80 or server.has_work:
            if now < 80:
                for _ in range(rng.integers(3)):
                    prompt = rng.integers(MODEL.vocab_size, size=rng.integers(1, 20))
                    one = request(f"{now}-{rng.random()}", prompt.tolist(), int(rng.integers(1, 30)))
                    server.submit(replace(one, engine=int(rng.integers(SOURCES))))
            if now % 7 == 0 and server.engines[0].running:
                server.cancel(server.engines[0]._rows.youngest.request.id)
            server.tick(float(now))
            now += 1
            assert now < 500
        server.tick(now + 2.0)  # publishes
        status = server.status()
        assert status.preemptions > 0
    assert len(lessons) > 30
    for tokens_SB, counts_LSE in lessons:
        chosen_SB = tokens_SB[:, : MODEL.vocab_size]
        assert chosen_SB.sum() == tokens_SB.sum()  # fewer token ids than buckets
        first_SE = np.stack([chosen_SB[:, e::EXPERTS].sum(axis=1) for e in range(EXPERTS)], axis=1)
        assert (counts_LSE == sum(np.roll(first_SE, choice, axis=1) for choice in range(2))).all()
    computed_S = sum(tokens_SB.sum(axis=1) for tokens_SB, _ in lessons)
    assert computed_S.tolist() == list(status.tokens_computed_S)


def test_prompts_are_near_the_source_that_holds_their_experts():
    """Token t goes to the experts t and t + 1 of 4: 0 and 1 are on source 0's ranks, 2 and 3 on source 1's."""
    with open_server(WITH_AFFINITY) as (server, _, _):
        assert server.distance_BS is None
        for now in range(300):
            for s in range(SOURCES):
                own = int(np.random.default_rng(SOURCES * now + s).integers(2))
                server.submit(request(f"{now}-{s}", (2 * own,) * 12, 1, engine=s))
            server.tick(float(now))
        near_0_S, near_1_S = (prompt_distance_S(server.distance_BS, (token,) * 5) for token in (0, 2))
        unseen_S = prompt_distance_S(server.distance_BS, (150, 151))
    assert near_0_S[0] < -0.5 < 0.5 < near_0_S[1] and near_1_S[1] < -0.5 < 0.5 < near_1_S[0]
    assert unseen_S == (0.0, 0.0)


def test_without_affinity_nothing_is_learned(lessons):
    with open_server() as (server, _, _):
        server.submit(request("a"))
        for now in range(10):
            server.tick(float(now))
        assert server.distance_BS is None and not lessons
