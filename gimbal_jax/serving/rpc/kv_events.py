"""Changes of the prefix caches as events of smg's protocol (common.proto of smg_grpc_proto)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

from smg_grpc_proto.generated import common_pb2 as pb

from gimbal_jax.config import ServerConfig
from gimbal_jax.exceptions import FellBehind, NotKept
from gimbal_jax.serving.engine.pages import CacheEvents, StoredPage
from gimbal_jax.serving.frontend.prefix_index import PageLog, PrefixIndex

CHUNK_PAGES = 512
"""Most pages of a snapshot in one message. With 64 tokens a page that is about 100 KB."""


class KvEvents:
    """Event streams of subscribers: a snapshot or the changes that they missed, then every new change.

    A change is one batch from every engine, all with the number of the change; the batch of an engine without news
    is empty. So the numbers of each engine have no gaps, as the gateway requires, and one number gives a
    subscriber's position. The first number is the start time in microseconds, so that numbers of an earlier process
    are never valid.
    """

    def __init__(
        self,
        index: PrefixIndex,
        log: PageLog,
        config: ServerConfig,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """``wall_clock`` is Unix time in seconds. ``clock`` is the clock of ``log``."""
        self._index, self._log = index, log
        self._engines, self._page_size = config.mesh.dp, config.engine.page_size
        self._clock, self._wall_clock = clock, wall_clock
        self._first = int(wall_clock() * 1e6)

    def place_of(self, start: int) -> int | None:
        """Return the place in the log after which a subscriber with last number ``start`` continues; None for 0.

        Raises NotKept if the log does not hold the changes after ``start``.
        """
        if start == 0:
            return None
        at = start - self._first
        if self._log.after(at) is None:
            oldest, newest = self._first + self._log.oldest - 1, self._first + self._log.last
            rule = f"be 0 (a snapshot) or in [{oldest}, {newest}], the changes that are kept"
            raise NotKept(f"start_sequence_number must {rule}, not {start}")
        return at

    async def batches(self, at: int | None) -> AsyncGenerator[pb.KvEventBatch]:
        """Yield all changes after place ``at`` until the log is closed. None yields a snapshot first.

        Raises FellBehind if the log drops changes before they are read.
        """
        if at is None:
            at = self._log.last
            for batch in self._snapshot(at):
                yield batch
        while not self._log.closed:
            changes = self._log.after(at)
            if changes is None:
                raise FellBehind("the subscriber fell behind. Subscribe again from 0, which sends a snapshot.")
            for change in changes:
                stamp = self._wall_clock() - (self._clock() - change.time)
                news_S = {news.engine: news for news in change.news}
                for engine in range(self._engines):
                    events = _events(news_S[engine], self._page_size) if engine in news_S else ()
                    yield self._batch(change.number, stamp, engine, events)
                at = change.number
            if at == self._log.last:
                await self._log.changed()

    def _snapshot(self, at: int) -> Iterator[pb.KvEventBatch]:
        """Yield all pages as of change ``at``. Each engine's numbers end at ``at``. The first chunk has a clear."""
        pages_S = [self._index.snapshot(engine) for engine in range(self._engines)]
        chunks = [
            (engine, start, pages[start : start + CHUNK_PAGES])
            for engine, pages in enumerate(pages_S)
            for start in range(0, max(1, len(pages)), CHUNK_PAGES)
        ]
        total, stamp = sum(map(len, pages_S)), self._wall_clock()
        for number, (engine, start, pages) in enumerate(chunks):
            clear = [pb.KvCacheEvent(cleared=pb.KvCacheCleared())] if number == 0 else []
            stored = [pb.KvCacheEvent(stored=one) for one in _stored(pages, self._page_size)]
            left = max(0, len(pages_S[engine]) - start - 1) // CHUNK_PAGES
            batch = self._batch(at - left, stamp, engine, clear + stored)
            batch.snapshot.CopyFrom(pb.KvSnapshotChunk(index=number, count=len(chunks), blocks=total))
            yield batch

    def _batch(self, number: int, stamp: float, engine: int, events: Sequence[pb.KvCacheEvent]) -> pb.KvEventBatch:
        return pb.KvEventBatch(sequence_number=self._first + number, timestamp=stamp, events=events, dp_rank=engine)


def block_hash(page_hash: bytes) -> int:
    """Return the first 64 bits of a page's hash as a signed integer, as the protocol defines it."""
    return int.from_bytes(page_hash[:8], "big", signed=True)


def _events(news: CacheEvents, page_size: int) -> list[pb.KvCacheEvent]:
    events = []
    if news.removed:
        removed = pb.KvBlocksRemoved(block_hashes=map(block_hash, news.removed))
        events.append(pb.KvCacheEvent(event_id=1, removed=removed))
    for stored in _stored(news.stored, page_size):
        events.append(pb.KvCacheEvent(event_id=len(events) + 1, stored=stored))
    return events


def _stored(pages: Sequence[StoredPage], page_size: int) -> list[pb.KvBlocksStored]:
    """Return one message for each run of pages of which each is the parent of the next."""
    runs: list[pb.KvBlocksStored] = []
    last = None
    for page in pages:
        if last is None or page.parent != last:
            parent = block_hash(page.parent) if page.parent else None
            runs.append(pb.KvBlocksStored(parent_block_hash=parent))
        runs[-1].blocks.add(block_hash=block_hash(page.hash), token_ids=page.tokens, block_size=page_size)
        last = page.hash
    return runs
