"""Beginnings that sequences share: names for the content of KV pages, and news of the pages that engines hold."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from gimbal_jax.serving.engine.pages import PagePool
from gimbal_jax.serving.engine.request import Request
from gimbal_jax.serving.engine.rows import Rows


def page_hashes(tokens: Sequence[int] | np.ndarray, page_size: int, parent: bytes = b"") -> tuple[bytes, ...]:
    """16 bytes for each full page of ``tokens``, over its tokens and all before them.

    ``parent`` is the hash of the page before the first one; empty at the beginning of a sequence. Were they shorter or
    weaker, two contents could be taken for one another, and a client would be answered from another's text.
    """
    ids = np.asarray(tokens, np.int32)
    hashes = []
    for end in range(page_size, len(ids) + 1, page_size):
        parent = blake2b(ids[end - page_size : end].tobytes(), key=parent, digest_size=16).digest()
        hashes.append(parent)
    return tuple(hashes)


def looks_up(request: Request) -> bool:
    """Whether a request may begin with pages that others computed. Log probabilities come only with the computing."""
    return request.sampling.prompt_logprobs is None


def known_pages(pool: PagePool, request: Request, names: Sequence[bytes], length: int, page_size: int) -> list[int]:
    """The pages of its beginning that a sequence can share, so that it computes at least one of its tokens.

    ``names`` are those of its full pages, and it has ``length`` tokens.
    """
    return pool.match(names[: (length - 1) // page_size]) if looks_up(request) else []


def publish_pages(pool: PagePool, rows: Rows, row: int, page_size: int) -> None:
    """Let others share the full pages of a row's sequence: what is computed by now, or by the step being planned.

    That is early enough: the devices write a layer's pages before they read them.
    """
    sequence = rows.sequence_R[row]
    assert sequence is not None
    names, end = sequence.page_names, int(rows.publish_at_R[row])
    while end <= min(rows.known_R[row], rows.computed_R[row]):
        number = end // page_size - 1
        parent, tokens = names[number - 1] if number else b"", rows.tokens_RN[row, end - page_size : end]
        if number == len(names):
            names += page_hashes(tokens, page_size, parent)
        pool.publish(int(rows.page_table_RM[row, number]), names[number], parent, tokens)
        end += page_size
    rows.publish_at_R[row] = end
