"""Shared beginnings on real devices: the same tokens, and less to compute."""

from dataclasses import replace

import numpy as np

from gimbal_jax.serving.engine.prefix import page_hashes
from tests.e2e.rig import CONFIG, random_requests, session
from tests.serving.statuses import per_engine


def test_shared_prefixes_change_no_token(runner):
    """Few pages, so that sequences are preempted and kept pages evicted while others are shared."""
    rng = np.random.default_rng(1)
    beginning = tuple(rng.integers(1, 60, 12).tolist())
    asked = [
        replace(one, prompt=(*beginning, *one.prompt)[:60] if i % 2 else one.prompt)
        for i, one in enumerate(random_requests(rng, 30))
    ]
    with session(runner) as apart:
        expected = apart.run(asked)
        computed = sum(per_engine(apart.server.status(), "tokens_computed"))
    with session(runner) as together:
        named = [replace(one, page_hashes=page_hashes(one.prompt, CONFIG.engine.page_size)) for one in asked]
        assert together.run(named) == expected
        status = together.server.status()
    assert sum(per_engine(status, "prefix_hits")) > 50 and status.preemptions > 0
    assert sum(per_engine(status, "tokens_computed")) < computed
