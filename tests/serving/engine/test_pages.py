"""Pages against a naive account of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gimbal_jax.serving.engine.pages import PagePool

TOKENS = np.zeros(4, np.int32)


def name(number: int) -> bytes:
    return number.to_bytes(16)


def named(pool: PagePool, *numbers: int) -> list[int]:
    """Pages in use with these names, as of one sequence."""
    pages = pool.allocate(len(numbers)) or []
    for page, number in zip(pages, numbers, strict=True):
        pool.publish(page, name(number), name(number - 1), TOKENS)
    return pages


def test_allocation_is_all_or_nothing():
    pool = PagePool(4)
    first = pool.allocate(3)
    assert first is not None
    assert pool.allocate(2) is None
    assert pool.available == 1
    assert sorted([*first, *(pool.allocate(1) or [])]) == [0, 1, 2, 3]
    assert pool.allocate(0) == []


def test_releasing_twice_or_an_unknown_page_is_an_error():
    pool = PagePool(4)
    (page,) = pool.allocate(1) or []
    pool.release([page])
    with pytest.raises(ValueError, match=f"page {page} is not in use"):
        pool.release([page])
    with pytest.raises(ValueError, match="page 9"):
        pool.release([9])
    assert pool.available == 4


def test_least_recently_used_pages_are_evicted_and_prefixes_last():
    pool = PagePool(4)
    old, young = named(pool, 1, 2), named(pool, 11, 12)
    pool.release(old)
    pool.release(young)
    pool.take(pool.match([name(1)]))  # used once more, and so later than the others
    pool.release(old[:1])
    gone = []
    for _ in range(4):
        known = {number for number in (1, 2, 11, 12) if pool.match([name(number)])}
        pool.allocate(1)
        gone += [number for number in known if not pool.match([name(number)])]
    assert gone == [2, 12, 11, 1]


def test_content_is_published_once():
    pool = PagePool(4)
    (first,) = named(pool, 1)
    (second,) = named(pool, 1)
    assert pool.match([name(1)]) == [first] and pool.named == 1
    pool.release([second])
    assert pool.available == 3 and pool.named == 1


def test_forgotten_pages_stay_with_their_users_only():
    pool = PagePool(4)
    used, kept = named(pool, 1, 2), named(pool, 11)
    pool.release(kept)
    pool.take(pool.match([name(1)]))
    pool.forget([*used, *kept])
    assert pool.match([name(1)]) == pool.match([name(11)]) == [] and pool.named == 0
    assert pool.available == 2
    pool.release(used)
    pool.release(used[:1])
    assert pool.available == 4


def test_flush_evicts_unused_pages():
    pool = PagePool(4)
    used, kept = named(pool, 1), named(pool, 11, 12)
    pool.release(kept)
    pool.flush()
    assert (pool.named, pool.available) == (1, 3)
    assert pool.match([name(1)]) == used


def test_cache_events_add_up_to_the_known_pages():
    """A page that comes and goes between two calls is no news."""
    pool = PagePool(2)
    assert pool.drain_cache_events(3) is None
    pages = named(pool, 1, 2)
    news = pool.drain_cache_events(3)
    assert news is not None
    assert (news.engine, [page.hash for page in news.stored], news.removed) == (3, [name(1), name(2)], ())
    assert (news.stored[1].parent, news.stored[1].tokens) == (name(1), (0, 0, 0, 0))
    pool.release(pages)
    pool.release(named(pool, 3))  # in place of 2
    pool.release(named(pool, 4, 5))  # in place of 1 and 3
    news = pool.drain_cache_events(3)
    assert news is not None
    assert [page.hash for page in news.stored] == [name(4), name(5)]
    assert set(news.removed) == {name(1), name(2)}
    assert pool.drain_cache_events(3) is None


moves = st.lists(st.tuples(st.sampled_from("asprfxl"), st.integers(0, 9), st.integers(1, 4)), max_size=60)


@settings(max_examples=300)
@given(moves)
def test_pages_are_conserved_and_kept_in_order_of_use(moves):
    """The naive account: who holds what, and known contents with their page, least recently used first."""
    size, pool = 8, PagePool(8)
    holders: list[list[int]] = []
    known: dict[int, int] = {}  # content: page
    kept: list[int] = []  # contents of pages that nobody uses
    heard: set[bytes] = set()

    def users(page: int) -> int:
        return sum(page in pages for pages in holders)

    for move, number, count in moves:
        holder = holders[number % len(holders)] if holders else []
        if move == "a":  # allocate
            used = {page for pages in holders for page in pages}
            pages = pool.allocate(count)
            assert (pages is None) == (count > size - len(used))
            if pages is not None:
                evicted = max(0, count - (size - len(used) - len(kept)))
                for content in kept[:evicted]:
                    del known[content]
                del kept[:evicted]
                assert len(set(pages)) == count and not set(pages) & used
                assert not set(pages) & {known[content] for content in kept}
                holders.append(pages)
        elif move == "s":  # share
            contents = list(range(number, number + count))
            pages = pool.match([name(content) for content in contents])
            run = next((i for i, content in enumerate(contents) if content not in known), count)
            assert pages == [known[content] for content in contents[:run]]
            assert pool.unused(pages) == sum(content in kept for content in contents[:run])
            pool.take(pages)
            kept = [content for content in kept if content not in contents[:run]]
            holders.append(pages)
        elif move == "p" and holder and holder[0] not in known.values():  # publish
            pool.publish(holder[0], name(number), b"", TOKENS)
            known.setdefault(number, holder[0])
        elif move == "r" and holders:  # release
            pages = holders.pop(number % len(holders))
            pool.release(pages)
            free_again = [page for page in reversed(pages) if not users(page)]
            kept += [content for page in free_again for content, at in known.items() if at == page]
        elif move == "f":  # forget
            pool.forget(holder)
            known = {content: page for content, page in known.items() if page not in holder}
        elif move == "x":  # flush
            pool.flush()
            known = {content: page for content, page in known.items() if content not in kept}
            kept = []
        elif move == "l" and (news := pool.drain_cache_events(0)) is not None:  # listen
            heard = (heard - set(news.removed)) | {page.hash for page in news.stored}
            assert heard == {name(content) for content in known}
        used = {page for pages in holders for page in pages}
        assert pool.available == size - len(used)
        assert pool.named == len(known)
        assert len(set(known.values())) == len(known)
