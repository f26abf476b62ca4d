"""Plans and times of the script that measures steps."""

from functools import partial

import numpy as np
import pytest

from benchmarks.step import plan_of, seconds_of
from gimbal_jax.config import EngineConfig
from gimbal_jax.model.inputs import step_shape
from gimbal_jax.serving.runtime.batch import bucket_for, step_buckets

ENGINE = EngineConfig(max_model_len=256)


@pytest.mark.parametrize("bucket", step_buckets(ENGINE, 1), ids=str)
@pytest.mark.parametrize("prompt", [16, 100, 128])
def test_a_plan_fills_its_bucket_on_pages_of_its_own(bucket, prompt):
    rows, tiles = bucket
    plan = plan_of(rows, tiles, 160, prompt, 256, ENGINE)
    assert bucket_for([plan], step_buckets(ENGINE, 1))[1] == plan.tiles == tiles
    assert sum(-(-len(chunk.tokens) // ENGINE.tile) for chunk in plan.prefill) == tiles
    assert len(plan.decode) == min(rows, ENGINE.max_rows - len(plan.prefill))
    assert len(plan.decode) + len(plan.prefill) <= step_shape(ENGINE, bucket).sequences
    pages = [plan.decode.page_table_DM[:, :11].reshape(-1), *(chunk.pages for chunk in plan.prefill)]
    assert len(np.unique(np.concatenate(pages))) == sum(map(len, pages))


def test_each_round_runs_all_in_turn_and_the_first_does_not_count():
    ran: list[str] = []
    seconds = seconds_of({name: partial(ran.append, name) for name in "ab"}, rounds=2)
    assert "".join(ran) == "ababab"
    assert all(0 <= found["least"] <= found["median"] for found in seconds.values())
