"""A request's tokens depend on nothing but the request: not on its neighbours, not on where the experts are."""

import time
from dataclasses import replace

import numpy as np
import pytest

from tests.e2e.rig import random_requests, session, shuffle_a_layer
from tests.serving.statuses import per_engine


@pytest.fixture(scope="module")
def requests():
    return random_requests(np.random.default_rng(1), 30)


@pytest.fixture(scope="module")
def expected(runner, requests):
    """Tokens of each request run alone."""
    tokens: dict[str, list[int]] = {}
    with session(runner) as alone:
        for request in requests:
            tokens |= alone.run([request])
    assert sum(len(output) for output in tokens.values()) > 200
    return tokens


def test_batching_changes_no_token(runner, requests, expected):
    with session(runner, engine={"max_rows": 3}) as batched:
        assert batched.run(requests) == expected
        assert batched.server.status().preemptions == 0


def test_preemption_changes_no_token(runner, requests, expected):
    with session(runner) as crowded:
        assert crowded.run(requests) == expected
        assert crowded.server.status().preemptions > 3


def test_late_binding_changes_no_token(runner, requests, expected):
    with session(runner, dispatch="late") as late:
        assert late.run([replace(request, engine=None, sequence=0) for request in requests]) == expected
        # Both engines took part, and what was preempted went on.
        assert min(per_engine(late.server.status(), "tokens_computed")) > 200
        assert late.server.status().preemptions > 3


def test_random_migrations_change_no_token(runner, requests, expected):
    rng = np.random.default_rng(2)
    before_LE = runner.slot_of_expert_LE
    with session(runner) as moved:
        assert moved.run(requests, between=lambda: shuffle_a_layer(runner, rng)) == expected
    assert not np.array_equal(runner.slot_of_expert_LE, before_LE)


def test_rebalancing_changes_no_token(runner, requests, expected):
    # Each prompt is of few tokens, so what is hot changes with what runs, and eplb follows every change.
    with session(runner, policy="eplb", window_steps=2, migrate_bytes_per_tick=1) as moved:
        # The placement thread needs a moment now and then.
        assert moved.run(requests, between=lambda: time.sleep(0.002)) == expected
        applied = [record for record in moved.server.status().placement.records if record.outcome == "applied"]
        assert len(applied) >= 3
        assert moved.server.status().placement.totals.experts_moved >= 10
