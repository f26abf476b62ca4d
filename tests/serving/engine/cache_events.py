"""Prefix caches' news, made up: pages of texts as an engine would tell them."""

from gimbal_jax.serving.engine.pages import CacheEvents, StoredPage
from gimbal_jax.serving.engine.prefix import page_hashes


def pages_of(tokens, size=4):
    """A StoredPage for each full page of a text."""
    hashes = page_hashes(tokens, size)
    parents = (b"", *hashes)
    starts = range(0, len(hashes) * size, size)
    return tuple(
        StoredPage(one, parent, tuple(tokens[start : start + size]))
        for one, parent, start in zip(hashes, parents, starts, strict=False)
    )


def stored(engine, *pages):
    return CacheEvents(engine, tuple(pages), ())


def removed(engine, *pages):
    return CacheEvents(engine, (), tuple(page.hash for page in pages))
