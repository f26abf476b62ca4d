"""Prefix sharing: names for the content of KV pages, and which pages of a request are known."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from gimbal_jax.serving.engine.pages import PagePool
from gimbal_jax.serving.engine.request import Request
from gimbal_jax.serving.engine.running_batch import RunningBatch


def page_hashes(tokens: Sequence[int] | np.ndarray, page_size: int, parent: bytes = b"") -> tuple[bytes, ...]:
    """Return 16 bytes for each full page of ``tokens``, a hash of its tokens and of all tokens before them.

    ``parent`` is the hash of the page before the first one; empty at the start of a sequence. With a shorter or weaker
    hash two contents could collide, and a client would receive output for the text of another client.
    """
    ids = np.asarray(tokens, np.int32)
    hashes = []
    for end in range(page_size, len(ids) + 1, page_size):
        parent = blake2b(ids[end - page_size : end].tobytes(), key=parent, digest_size=16).digest()
        hashes.append(parent)
    return tuple(hashes)


def looks_up(request: Request) -> bool:
    """Return whether a request may start with cached pages. Prompt log probabilities require computing the prompt."""
    return request.sampling.prompt_logprobs is None


def known_pages(pool: PagePool, request: Request, names: Sequence[bytes], length: int, page_size: int) -> list[int]:
    """Return the cached pages that a sequence can share. At least one of its tokens is left to compute.

    ``names``: hashes of its full pages. ``length``: its tokens.
    """
    return pool.match(names[: (length - 1) // page_size]) if looks_up(request) else []


def publish_pages(pool: PagePool, batch: RunningBatch, row: int, page_size: int) -> None:
    """Share the full pages of a row that are computed by now, or by the step that is being planned.

    That is early enough, because the devices write a layer's pages before they read them.
    """
    sequence = batch.sequence_R[row]
    assert sequence is not None
    names, end = sequence.page_names, int(batch.publish_at_R[row])
    while end <= min(batch.known_R[row], batch.computed_R[row]):
        number = end // page_size - 1
        parent, tokens = names[number - 1] if number else b"", batch.tokens_RN[row, end - page_size : end]
        if number == len(names):
            names += page_hashes(tokens, page_size, parent)
        pool.publish(int(batch.page_table_RM[row, number]), names[number], parent, tokens)
        end += page_size
    batch.published(row, end)
