import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.serving.pages import PageAllocator


def test_allocation_is_all_or_nothing():
    pages = PageAllocator(4)
    first = pages.allocate(3)
    assert first is not None
    assert pages.allocate(2) is None
    assert pages.available == 1
    assert sorted([*first, *(pages.allocate(1) or [])]) == [0, 1, 2, 3]
    assert pages.allocate(0) == []


def test_freeing_twice_or_an_unknown_page_is_an_error():
    pages = PageAllocator(4)
    (page,) = pages.allocate(1) or []
    pages.free([page])
    with pytest.raises(ValueError, match=f"page {page} is not in use"):
        pages.free([page])
    with pytest.raises(ValueError, match="page 9"):
        pages.free([9])
    assert pages.available == 4


@given(st.lists(st.integers(-8, 8)))
def test_no_page_has_two_owners(sizes):
    """Positive sizes allocate, negative ones free that many of the pages held."""
    pages, held = PageAllocator(10), list[int]()
    for size in sizes:
        if size >= 0:
            got = pages.allocate(size)
            assert (got is None) == (size > 10 - len(held))
            held += got or []
        else:
            pages.free(held[:-size])
            held = held[-size:]
        assert len(set(held)) == len(held) == 10 - pages.available
        assert set(held) <= set(range(10))
