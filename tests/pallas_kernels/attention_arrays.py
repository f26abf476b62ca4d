"""Queries and pages with NaN in all places that paged attention must not read."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tests.pallas_kernels.shapes import AttentionShape


class AttentionArrays(NamedTuple):
    """numpy arrays, in the order of the operation's arguments."""

    q_GQHD: Any
    k_pages: Any
    v_pages: Any
    page_table_GM: Any
    start_G: Any
    count_G: Any


def attention_arrays(
    shape: AttentionShape, start_G: list[int], count_G: list[int], window: int | None, seed: int, dtype: Any
) -> AttentionArrays:
    """Return normal values on scattered pages, and NaN in padding queries and in all places that no query sees.

    Table entries that no query uses are page 0, which is all NaN.
    """
    rng = np.random.default_rng(seed)
    pages_shape = (shape.num_pages, shape.page_size, shape.kv_heads, shape.dim)
    k_pages, v_pages = np.full((2, *pages_shape), np.nan, dtype)
    table_GM = np.zeros((shape.groups, shape.pages_per_row), np.int32)
    unused = iter(rng.permutation(np.arange(1, shape.num_pages)))
    q_GQHD = rng.normal(size=(shape.groups, shape.queries, shape.heads, shape.dim)).astype(dtype)
    for g, (start, count) in enumerate(zip(start_G, count_G, strict=True)):
        q_GQHD[g, count:] = np.nan
        begin, end = seen_context(start, count, window)
        for m in range(begin // shape.page_size, -(-end // shape.page_size)):
            table_GM[g, m] = page = next(unused)
            at = m * shape.page_size
            seen = slice(max(begin - at, 0), end - at)
            for pages in (k_pages, v_pages):
                pages[page, seen] = rng.normal(size=pages[page, seen].shape)
    return AttentionArrays(q_GQHD, k_pages, v_pages, table_GM, np.array(start_G, np.int32), np.array(count_G, np.int32))


def seen_context(start: int, count: int, window: int | None) -> tuple[int, int]:
    """Return the positions [begin, end) that at least one token of a group sees."""
    return max(0, start + 1 - window) if window else 0, start + count if count else 0
