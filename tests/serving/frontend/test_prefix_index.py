"""What the frontend knows of prefix caches, against a naive model of them."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.serving.engine.pages import CacheEvents
from gimbal_jax.serving.engine.prefix import page_hashes
from gimbal_jax.serving.frontend import prefix_index
from gimbal_jax.serving.frontend.prefix_index import PageLog, PrefixIndex
from tests.serving.engine.cache_events import pages_of, removed, stored

TEXTS = [tuple(text) for text in ([1] * 20, [1] * 8 + [2] * 12, [3] * 16)]
PAGES = {page.hash: page for text in TEXTS for page in pages_of(text)}


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.sampled_from(sorted(PAGES))), max_size=60))
def test_cached_tokens_match_a_naive_model(steps):
    index = PrefixIndex(3)
    held_S: list[set[bytes]] = [set(), set(), set()]
    for engine, is_stored, name in steps:
        index.apply((stored if is_stored else removed)(engine, PAGES[name]))
        (held_S[engine].add if is_stored else held_S[engine].discard)(name)
        assert index.pages == sum(map(len, held_S))
    for text in TEXTS:
        hashes = page_hashes(text, 4)
        runs = [max(n for n in range(len(hashes) + 1) if held.issuperset(hashes[:n])) for held in held_S]
        assert index.cached_tokens_S(hashes, 4) == tuple(4 * run for run in runs)
    for engine, held in enumerate(held_S):
        listed = [page.hash for page in index.snapshot(engine)]
        assert sorted(listed) == sorted(held)
        for place, name in enumerate(listed):
            assert PAGES[name].parent not in listed[place:]


def test_a_page_removed_and_stored_in_one_tick_is_held():
    index, (page, *_) = PrefixIndex(1), pages_of(TEXTS[0])
    for _ in range(2):
        index.apply(CacheEvents(0, (page,), (page.hash,)))
        assert index.pages == 1


@given(st.lists(st.integers(1, 9), max_size=30), st.integers(-3, 40))
def test_the_log_returns_later_changes_or_none(sizes, number):
    async def main():
        log = PageLog()
        pages = pages_of(range(40))
        for time, size in enumerate(sizes):
            log.add(float(time), [stored(0, *pages[:size])])
        changes = log.after(number)
        kept = [change.number for change in log.after(log.oldest - 1) or ()]
        assert kept == list(range(log.oldest, len(sizes) + 1))
        if not log.oldest - 1 <= number <= len(sizes):
            assert changes is None
        else:
            assert changes is not None
            assert [change.number for change in changes] == list(range(number + 1, len(sizes) + 1))
            assert [len(change.news[0].stored) for change in changes] == sizes[number:]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_index, "LOG_PAGES", 20)
        patch.setattr(prefix_index, "LOG_TICKS", 8)
        asyncio.run(main())


def test_the_log_is_bounded_by_ticks_and_pages(monkeypatch):
    monkeypatch.setattr(prefix_index, "LOG_PAGES", 20)
    monkeypatch.setattr(prefix_index, "LOG_TICKS", 8)

    async def main():
        for size, kept in [(1, 8), (5, 4), (30, 1)]:
            log = PageLog()
            for _ in range(50):
                log.add(0.0, [stored(0, *pages_of(range(4 * size)))])
            assert log.last + 1 - log.oldest == kept

    asyncio.run(main())


def test_changed_returns_after_a_change_and_after_close():
    async def main():
        log = PageLog()
        for end in (lambda: log.add(0.0, []), log.close):
            waiting = [asyncio.create_task(log.changed()) for _ in range(2)]
            await asyncio.sleep(0.01)
            assert not any(task.done() for task in waiting)
            end()
            await asyncio.wait_for(asyncio.gather(*waiting), 60)
        await asyncio.wait_for(log.changed(), 60)  # nothing more can come

    asyncio.run(main())
