"""The engine under random traffic: overlapped or not, with shared beginnings or without."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from gimbal_jax.config import EngineConfig
from gimbal_jax.serving.engine.engine import Engine
from gimbal_jax.serving.engine.limits import max_sequence_tokens
from gimbal_jax.serving.engine.plan import Plan
from gimbal_jax.serving.engine.prefix import page_hashes
from gimbal_jax.serving.engine.request import Request, SamplingParams
from tests.serving.engine.paged_model import VOCAB, PagedModel, alone
from tests.serving.engine.stepped_engine import FCFS, HRRN, PRIORITY, SJF, Ahead


@st.composite
def engine_configs(draw) -> EngineConfig:
    rows, tile = draw(st.integers(1, 5)), draw(st.sampled_from([1, 4, 8]))
    return EngineConfig(
        max_model_len=draw(st.integers(8, 40)),
        page_size=draw(st.sampled_from([1, 4, 5])),
        num_pages=draw(st.integers(3, 24)),
        max_rows=rows,
        token_budget=draw(st.integers(max(rows, tile), 24)),
        tile=tile,
        prefix_cache=draw(st.booleans()),
    )


@st.composite
def workloads(draw):
    """(configuration, queue, requests with the step they arrive in and perhaps the step they are cancelled in)."""
    config = draw(engine_configs())
    limit = max_sequence_tokens(config)
    tokens = st.integers(0, VOCAB - 1)
    beginnings = [(), *draw(st.lists(st.lists(tokens, min_size=1, max_size=limit - 1), max_size=2))]
    jobs = []
    for i in range(draw(st.integers(1, 8))):
        arrival = draw(st.integers(0, 12))
        prompt = (*draw(st.sampled_from(beginnings)), *draw(st.lists(tokens, min_size=1, max_size=limit - 1)))
        prompt = prompt[: limit - 1]
        max_tokens = draw(st.integers(1, 20))
        params = SamplingParams(
            max_tokens,
            min_tokens=draw(st.integers(0, max_tokens)),
            seed=draw(st.integers(0, 3)),
            stop_token_ids=tuple(draw(st.sets(tokens, max_size=2))),
        )
        cancel, priority = draw(st.none() | st.integers(0, 15)), draw(st.integers(-1, 1))
        hashes = page_hashes(prompt, config.page_size) if draw(st.integers(0, 3)) else ()
        request = Request(str(i), prompt, params, arrival * 0.7, 0, i + 1, priority, page_hashes=hashes)
        jobs.append((request, arrival, cancel))
    flushes = draw(st.sets(st.integers(0, 20), max_size=2))
    return config, draw(st.sampled_from([FCFS, SJF, HRRN, PRIORITY])), jobs, flushes


@settings(max_examples=400, deadline=None)
@given(workloads(), st.integers(0, 2))
def test_batching_changes_no_token_and_pages_are_conserved(workload, ahead):
    config, queue, jobs, flushes = workload
    engine, model = Engine(0, config, queue), PagedModel(config)
    loop = Ahead(engine, model, ahead)
    tokens: dict[str, tuple[int, ...]] = {req.id: () for req, _, _ in jobs}
    ends: dict[str, str] = {}
    cancelled: set[str] = set()
    stored: dict[bytes, tuple[int, ...]] = {}
    computed = 0
    for tick in range(2000):
        for req, arrival, cancel in jobs:
            if arrival == tick:
                engine.add(req)
            if cancel is not None and arrival + cancel == tick and engine.cancel(req.id):
                cancelled.add(req.id)
        if tick in flushes:
            engine.flush_cache()
        if loop.idle and tick > 20:
            break
        busy, results_came = not engine.idle, bool(loop.in_flight)
        planned, outputs = loop.tick(tick * 0.7)
        check_plan(planned.plan, config)
        assert planned.plan.tokens > 0 or results_came or not busy, "a step without progress"
        computed += planned.plan.tokens
        for out in outputs:
            assert out.request_id not in cancelled
            assert out.request_id not in ends
            tokens[out.request_id] += out.token_ids
            if out.finish_reason:
                ends[out.request_id] = out.finish_reason
        check_pages(engine, model, config, stored)
    assert loop.idle, "still busy after 2000 steps"
    assert engine.free_pages == config.num_pages
    assert engine.tokens_computed == computed
    assert config.prefix_cache or not stored
    for req, _, _ in jobs:
        if req.id in cancelled:
            assert tokens[req.id] == alone(req, config)[0][: len(tokens[req.id])]
        else:
            assert (tokens[req.id], ends[req.id]) == alone(req, config)


def check_plan(plan: Plan, config: EngineConfig) -> None:
    decode = plan.decode
    assert plan.tokens <= config.token_budget
    assert plan.tiles == sum(-(-len(chunk.tokens) // config.tile) for chunk in plan.prefill)
    assert plan.tiles <= config.token_budget // config.tile
    rows = [*decode.row_D.tolist(), *(chunk.row for chunk in plan.prefill)]
    assert len(set(rows)) == len(rows) and all(0 <= row < config.max_rows for row in rows)
    assert len(decode.page_table_DM) == len(decode)
    for start, table in zip(decode.start_D.tolist(), decode.page_table_DM, strict=True):
        assert not table[start // config.page_size + 1 :].any()
    for chunk in plan.prefill:
        assert len(chunk.tokens) > 0 and chunk.tokens.min() >= 0
        assert chunk.start + len(chunk.tokens) <= len(chunk.pages) * config.page_size


def check_pages(engine: Engine, model: PagedModel, config: EngineConfig, stored: dict) -> None:
    """Pages are conserved; the cache holds what its news say, and pages hold what their names say."""
    held = [rows.pages(one.row).tolist() for rows in [engine._batch] for one in rows.running]
    assert all(len(set(pages)) == len(pages) for pages in held)
    assert len({page for pages in held for page in pages}) == config.num_pages - engine.free_pages
    news = engine.drain_cache_events()
    if news is not None:
        for name in news.removed:
            del stored[name]
        for page in news.stored:
            assert page.hash not in stored and (page.parent,) != (page.hash,)
            stored[page.hash] = page.tokens
            assert page_hashes(page.tokens, config.page_size, page.parent) == (page.hash,)
    assert len(stored) == engine.cached_pages
    for name, content in stored.items():
        (place,) = engine._pool.match([name])
        assert tuple(model.cache[place].tolist()) == content


def test_the_cache_changes_no_token():
    """The same traffic, and far less to compute: the page size divides the beginning of all prompts."""
    config = EngineConfig(
        max_model_len=64, page_size=4, num_pages=40, max_rows=4, token_budget=16, tile=4, prefix_cache=True
    )
    beginning, computed, outputs = tuple(i % VOCAB for i in range(24)), [], []
    for prefix_cache in (True, False):
        chosen = dataclasses.replace(config, prefix_cache=prefix_cache)
        engine = Engine(0, chosen, FCFS)
        for i in range(10):
            prompt = (*beginning, i % VOCAB, i // VOCAB, 3)
            sampling = SamplingParams(6, seed=i)
            engine.add(Request(str(i), prompt, sampling, float(i), 0, i, page_hashes=page_hashes(prompt, 4)))
        news = Ahead(engine, PagedModel(chosen), 1).run()
        outputs.append(sorted((out.request_id, out.token_ids, str(out.finish_reason)) for out in news))
        computed.append(engine.prefill_tokens)
        assert engine.prefix_queries == (270 if prefix_cache else 0)
        assert engine.prefix_hits == (9 * 24 if prefix_cache else 0)
    assert outputs[0] == outputs[1]
    assert computed == [27 + 9 * 3, 270]
