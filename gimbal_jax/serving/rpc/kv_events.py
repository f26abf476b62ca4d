"""The prefix caches' changes as the events of smg's protocol (smg_grpc_proto's common.proto)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

from smg_grpc_proto.generated import common_pb2 as pb

from gimbal_jax.config import ServerConfig
from gimbal_jax.exceptions import FellBehind, NotKept
from gimbal_jax.serving.engine.pages import PageNews, StoredPage
from gimbal_jax.serving.frontend.prefix_index import PageLog, PrefixIndex

CHUNK_PAGES = 512
"""Pages of a snapshot in one message: 64 tokens each are about 100 KB."""


class KvEvents:
    """What subscribers get: a snapshot or what they have missed, then every change.

    A change is a batch from every engine, an empty one where it has no news, all with the change's number. So the
    numbers of each engine are without gaps, as the gateway wants them, and one number says how far a subscriber is.
    They begin with the time of the start in microseconds: those of an earlier process are never taken for ours.
    """

    def __init__(
        self,
        index: PrefixIndex,
        log: PageLog,
        config: ServerConfig,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """``wall_clock`` is Unix time in seconds, ``clock`` the log's own."""
        self._index, self._log = index, log
        self._engines, self._page_size = config.mesh.dp, config.engine.page_size
        self._clock, self._wall_clock = clock, wall_clock
        self._first = int(wall_clock() * 1e6)

    def place_of(self, start: int) -> int | None:
        """Place in the log from which a subscriber goes on whose last number is ``start``; 0 has none: None.

        Raises NotKept.
        """
        if start == 0:
            return None
        at = start - self._first
        if self._log.after(at) is None:
            oldest, newest = self._first + self._log.oldest - 1, self._first + self._log.last
            rule = f"be 0 (the present state) or in [{oldest}, {newest}], the changes that are kept"
            raise NotKept(f"start_sequence_number must {rule}, not {start}")
        return at

    async def batches(self, at: int | None) -> AsyncGenerator[pb.KvEventBatch]:
        """Everything after that place, None for the present state first, until the log is closed. Raises FellBehind."""
        if at is None:
            at = self._log.last
            for batch in self._snapshot(at):
                yield batch
        while not self._log.closed:
            changes = self._log.after(at)
            if changes is None:
                raise FellBehind("the subscriber fell behind: subscribe again from 0, the present state")
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
        """All pages as of change ``at``. Each engine's numbers end at ``at``; the first chunk begins with a clear."""
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
    """The protocol's 64 bits of a page's hash."""
    return int.from_bytes(page_hash[:8], "big", signed=True)


def _events(news: PageNews, page_size: int) -> list[pb.KvCacheEvent]:
    events = []
    if news.removed:
        removed = pb.KvBlocksRemoved(block_hashes=map(block_hash, news.removed))
        events.append(pb.KvCacheEvent(event_id=1, removed=removed))
    for stored in _stored(news.stored, page_size):
        events.append(pb.KvCacheEvent(event_id=len(events) + 1, stored=stored))
    return events


def _stored(pages: Sequence[StoredPage], page_size: int) -> list[pb.KvBlocksStored]:
    """One for each run of pages that follow one another."""
    runs: list[pb.KvBlocksStored] = []
    last = None
    for page in pages:
        if last is None or page.parent != last:
            parent = block_hash(page.parent) if page.parent else None
            runs.append(pb.KvBlocksStored(parent_block_hash=parent))
        runs[-1].blocks.add(block_hash=block_hash(page.hash), token_ids=page.tokens, block_size=page_size)
        last = page.hash
    return runs
