"""Beginnings that sequences share: names for the content of KV pages, and news of the pages that engines hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np


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


@dataclass(frozen=True, eq=False)
class StoredPage:
    """A page that can be shared from now on."""

    hash: bytes
    parent: bytes
    """Hash of the page before it; empty at the beginning of a sequence."""
    tokens: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PageNews:
    """What changed in one engine's prefix cache in a tick: first pages were removed, then others stored."""

    engine: int
    stored: tuple[StoredPage, ...]
    removed: tuple[bytes, ...]
