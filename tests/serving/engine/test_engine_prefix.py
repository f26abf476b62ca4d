"""Sequences that share the pages of a common beginning."""

import dataclasses

from gimbal_jax.scheduler.late import Capacity
from gimbal_jax.serving.engine.engine import Engine
from gimbal_jax.serving.engine.prefix import page_hashes
from tests.serving.engine.paged_model import PagedModel, alone, request
from tests.serving.engine.stepped_engine import CONFIG, FCFS, SJF, Ahead, result, schedule, step

PAGE = CONFIG.page_size


def shared(name, prompt, max_tokens=4, **more):
    return request(name, prompt, max_tokens, page_size=PAGE, **more)


def test_a_prefix_is_computed_once_and_the_last_token_always():
    engine, model = Engine(0, CONFIG, FCFS), PagedModel(CONFIG)
    n = tuple(range(14))
    for prompt, computed in [(n[:12], 12), (n[:12], 4), (n[:11], 3), (n, 2), ((*n[:4], 9, 5, 6), 3), (n[:3], 3)]:
        before = engine.prefill_tokens
        engine.add(shared("a", prompt, 1))
        _, (out,) = step(engine, model)
        assert (out.token_ids, out.finish_reason) == alone(request("a", prompt, 1), CONFIG)
        assert (engine.prefill_tokens - before, out.cached_tokens) == (computed, len(prompt) - computed)
    assert engine.free_pages == CONFIG.num_pages
    assert engine.prefix_hits == 8 + 8 + 12 + 4
    assert engine.prefix_queries == 12 + 12 + 11 + 14 + 7  # one of three tokens has no page to look up


def test_sequences_of_one_step_share_what_the_step_writes():
    engine, model = Engine(0, dataclasses.replace(CONFIG, token_budget=32), FCFS), PagedModel(CONFIG)
    engine.add(shared("a", 13, seed=1))
    engine.add(shared("b", 13, sequence=2, seed=2))
    planned, outputs = step(engine, model)
    assert planned.prefill == [("a", 13), ("b", 1)]
    pages = [chunk.pages.tolist() for chunk in planned.plan.prefill]
    assert pages[0][:3] == pages[1][:3] and pages[0][3] != pages[1][3]
    assert CONFIG.num_pages - engine.free_pages == 5
    outputs += Ahead(engine, model, 0).run()
    for name, seed in [("a", 1), ("b", 2)]:
        assert result(outputs, name) == alone(request(name, 13, seed=seed), CONFIG)


def test_output_is_shared():
    """A conversation goes on with what was answered; overlap or not."""
    for ahead in (0, 1):
        engine, model = Engine(0, CONFIG, FCFS), PagedModel(CONFIG)
        engine.add(shared("a", 6, 12))
        answer, _ = result(Ahead(engine, model, ahead).run(), "a")
        # All of it but the last token is computed, 17 tokens: 4 pages.
        asked = (*range(6), *answer, 1, 1, 1)
        engine.add(shared("b", asked, 1))
        _, (out,) = step(engine, model)
        assert out.cached_tokens == 16
        assert out.token_ids == alone(request("b", asked, 1), CONFIG)[0]


def test_a_preempted_sequence_finds_its_own_pages_again():
    config = dataclasses.replace(CONFIG, num_pages=5, max_model_len=20)
    engine, model = Engine(0, config, FCFS), PagedModel(config)
    old, young = shared("old", 5, 8, seed=1), shared("young", (9, 8, 7, 6, 5), 8, arrival=1.0, sequence=2, seed=2)
    engine.add(old)
    engine.add(young)
    loop, outputs, before = Ahead(engine, model, 0), [], 0
    while not engine.preemptions:
        before = engine.prefill_tokens
        outputs += loop.tick()[1]
    assert engine.trace(0.0, 0.0).waiting_prefill_tokens < 9  # of nine tokens a page at least is known
    outputs += loop.run()
    for one in (old, young):
        assert result(outputs, one.id) == alone(one, config)
    assert 0 < engine.prefill_tokens - before < 9 * engine.preemptions


def test_unused_pages_are_evicted_oldest_first():
    config = dataclasses.replace(CONFIG, num_pages=8, max_model_len=32)
    engine, model = Engine(0, config, FCFS), PagedModel(config)
    for start in (0, 1):
        engine.add(shared("past", tuple(range(start, start + 9)), 1))
        step(engine, model)
    assert (engine.cached_pages, engine.free_pages) == (4, 8)
    engine.add(shared("running", tuple(range(9)), 9))  # shares the oldest two
    step(engine, model)
    engine.add(shared("large", (5,) * 19, 1, sequence=2))  # 5 pages, and 3 + 2 others are in use
    planned, _ = step(engine, model)
    assert planned.all == [("running", 1), ("large", 15)]
    known = [engine.cached_tokens(shared("x", tuple(range(start, start + 9)))) for start in (0, 1)]
    assert known == [8, 0]


def test_pages_that_the_cache_can_evict_are_no_pressure():
    engine, model = Engine(0, CONFIG, FCFS), PagedModel(CONFIG)
    engine.add(shared("a", 15, 1))
    step(engine, model)
    assert engine.cached_pages == 3
    assert (engine.trace(0.0, 0.0).kv_use, engine.free_pages) == (0.0, CONFIG.num_pages)
    engine.flush_cache()
    assert (engine.cached_pages, engine.free_pages) == (0, CONFIG.num_pages)


def test_the_queue_does_not_count_cached_tokens():
    engine, model = Engine(0, CONFIG, SJF), PagedModel(CONFIG)
    engine.add(shared("first", 16, 1))
    step(engine, model)
    engine.add(shared("fresh", (5,) * 6, arrival=1.0, sequence=2))
    engine.add(shared("known", 20, arrival=2.0, sequence=3))  # 4 left of 20
    assert engine.trace(2.0, 0.0).waiting_prefill_tokens == 6 + 4
    head = engine.queue_head(2.0)
    assert head is not None and (head.request_id, head.prefill_tokens) == ("known", 4)
    assert schedule(engine, 2.0).prefill == [("known", 4), ("fresh", 6)]


def test_a_cached_prefix_takes_no_page_twice():
    config = dataclasses.replace(CONFIG, num_pages=8, max_model_len=32)
    engine, model = Engine(0, config, FCFS), PagedModel(config)
    engine.add(shared("a", 17, 9))  # 5 pages
    step(engine, model)
    step(engine, model)
    engine.add(shared("b", 17, 2, sequence=2))  # 5 more would not fit, and 1 does
    assert schedule(engine).all == [("a", 1), ("b", 1)]
    assert engine.capacity() == Capacity(2, 2, 2, ())


def test_prompt_logprobs_are_computed_even_for_a_cached_prompt():
    engine, model = Engine(0, CONFIG, FCFS), PagedModel(CONFIG)
    engine.add(shared("a", 13, 1))
    step(engine, model)
    engine.add(shared("b", 13, 1, prompt_logprobs=0))
    _, (out,) = step(engine, model)
    assert [entry.chosen for entry in out.prompt_logprobs] == list(range(1, 13))
    assert (out.cached_tokens, engine.prefix_queries) == (0, 13)


def test_no_page_is_shared_if_sharing_is_off_or_not_requested():
    off = dataclasses.replace(CONFIG, prefix_cache=False)
    for config, hashes in [(off, True), (CONFIG, False)]:
        engine, model = Engine(0, config, FCFS), PagedModel(config)
        for _ in range(2):
            engine.add(shared("a", 12, 1) if hashes else request("a", 12, 1))
            _, (out,) = step(engine, model)
            assert out.cached_tokens == 0
        assert (engine.prefill_tokens, engine.cached_pages, engine.prefix_queries) == (24, 0, 0)
        assert engine.drain_cache_events() is None


def test_cache_events_name_pages_with_their_tokens():
    engine, model = Engine(3, CONFIG, FCFS), PagedModel(CONFIG)
    engine.add(shared("a", 9, 1))
    step(engine, model)
    news = engine.drain_cache_events()
    hashes = page_hashes(range(9), PAGE)
    assert news is not None and news.engine == 3 and news.removed == ()
    assert [(page.hash, page.parent, page.tokens) for page in news.stored] == [
        (hashes[0], b"", (0, 1, 2, 3)),
        (hashes[1], hashes[0], (4, 5, 6, 7)),
    ]
    engine.flush_cache()
    news = engine.drain_cache_events()
    assert news is not None and (news.stored, set(news.removed)) == ((), set(hashes))
