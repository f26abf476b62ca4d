"""Dispatch with and without knowledge of the prefix caches, for conversations with shared prefixes on two engines.

Frontend, core, engines and caches are real. Only the devices are fake.
"""

import asyncio
import dataclasses
import random
from collections import Counter

import pytest

from gimbal_jax.config import DispatchConfig, EngineConfig, MeshConfig, ServerConfig
from gimbal_jax.scheduler.dispatch import Choose, choose_engine
from gimbal_jax.serving.engine.prefix import page_hashes
from gimbal_jax.serving.engine.request import SamplingParams
from gimbal_jax.serving.frontend.frontend import Frontend
from gimbal_jax.serving.frontend.record import RequestRecord
from tests.serving.core.ticked_core import open_core
from tests.serving.statuses import per_engine

CONFIG = ServerConfig(
    MeshConfig(dp=2, tp=1),
    EngineConfig(max_model_len=256, page_size=4, num_pages=512, max_rows=8, token_budget=32, tile=4),
    DispatchConfig(trace_period_s=0.1),
)
CONVERSATIONS, TURNS = 40, 4


def cache_blind(view, config, token_budget):
    """Gimbal's rule without the frontend's index."""
    return choose_engine(dataclasses.replace(view, cached_tokens_S=(0,) * len(view.traces)), config, token_budget)


async def converse(choose: Choose, seed: int) -> tuple[list[RequestRecord], Frontend]:
    """Every conversation sends its history and a new question, turn by turn, after a pause. A topic is a prefix."""
    draw = random.Random(seed)
    topics = [tuple(draw.choices(range(290), k=32)) for _ in range(3)]
    records: list[RequestRecord] = []
    now = 0.0
    with open_core(CONFIG) as (core, _, _):
        frontend = Frontend(core, lambda: now, choose, records.append)

        async def conversation(number: int) -> None:
            history = topics[number % 3]
            for turn in range(TURNS):
                due = now + draw.uniform(0, 0.4)
                while now < due:
                    await asyncio.sleep(0)
                history += tuple(draw.choices(range(290), k=draw.randint(8, 24)))
                stream = frontend.generate(
                    f"{number}/{turn}",
                    history,
                    SamplingParams(draw.randint(2, 12), temperature=0.0),
                    page_hashes=page_hashes(history, CONFIG.engine.page_size),
                )
                history += tuple([token async for delta in stream for token in delta.token_ids])

        tasks = [asyncio.create_task(conversation(number)) for number in range(CONVERSATIONS)]
        while not all(task.done() for task in tasks):
            core.tick(now)
            now += 0.05
            for _ in range(6):
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        # The index has exactly the pages that the engines hold.
        for engine, pages in enumerate(per_engine(core.status(), "cached_pages")):
            assert len(frontend.prefixes.snapshot(engine)) == pages
        status = core.status()
        assert sum(per_engine(status, "prefix_hits")) == sum(record.cached_tokens or 0 for record in records)
    return records, frontend


def hit_rate(records: list[RequestRecord]) -> float:
    return sum(record.cached_tokens or 0 for record in records) / sum(record.prompt_tokens for record in records)


def mean_wait(records: list[RequestRecord]) -> float:
    return sum(record.first_token_s or 0.0 for record in records) / len(records)


@pytest.mark.parametrize("seed", range(2))
def test_knowing_the_caches_raises_hits_and_keeps_engines_balanced(seed):
    async def main():
        async with asyncio.timeout(120):
            return [await converse(choose, seed) for choose in (choose_engine, cache_blind)]

    (knowing, frontend), (blind, _) = asyncio.run(main())
    assert len(knowing) == len(blind) == CONVERSATIONS * TURNS
    assert hit_rate(knowing) > 1.1 * hit_rate(blind)
    assert mean_wait(knowing) < 0.9 * mean_wait(blind)
    ran = Counter(record.engine for record in knowing)
    assert min(ran[engine] for engine in range(2)) > 0.4 * len(knowing)
    assert frontend.counters.rules["cached"] > 0
