"""KV events over gRPC: a subscriber that applies them knows the pages of each engine, whenever it subscribes."""

import asyncio
import contextlib
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2 as pb

from gimbal_jax.serving.engine.pages import CacheEvents
from gimbal_jax.serving.frontend import prefix_index
from gimbal_jax.serving.rpc import kv_events
from gimbal_jax.serving.rpc.kv_events import block_hash
from tests.serving.engine.cache_events import pages_of, removed, stored
from tests.serving.fake_server import FakeCore, running_server, with_server

A, B, C = (pages_of(text) for text in ([1] * 12, [1] * 8 + [2] * 8, [3] * 4))
Code = grpc.StatusCode


class Subscriber:
    """A subscriber that applies batches as the gateway does.

    Numbers of an engine must be consecutive, and parents must come before their children.
    """

    def __init__(self, client, start=0):
        self.held_S: list[dict[int, Any]] = [{}, {}]
        self.last_S: list[int | None] = [start or None] * 2
        self.batches: list[pb.KvEventBatch] = []
        self.call = client.engine.SubscribeKvEvents(pb.SubscribeKvEventsRequest(start_sequence_number=start))

    async def read(self, count=1):
        for _ in range(count):
            batch = await asyncio.wait_for(self.call.read(), 60)
            assert batch is not grpc.aio.EOF
            self.apply(batch)
        return self

    def apply(self, batch):
        self.batches.append(batch)
        engine, last = batch.dp_rank, self.last_S[batch.dp_rank]
        if batch.HasField("snapshot"):
            self.held_S = [{}, {}] if batch.snapshot.index == 0 else self.held_S
        elif last is not None:
            assert batch.sequence_number == last + 1
        self.last_S[engine] = batch.sequence_number
        held = self.held_S[engine]
        for event in batch.events:
            for gone in event.removed.block_hashes:
                del held[gone]
            parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
            for block in event.stored.blocks:
                assert parent is None or parent in held
                assert block.block_size == len(block.token_ids) == 4
                held[block.block_hash] = (parent, tuple(block.token_ids))
                parent = block.block_hash

    def knows(self, *pages_S):
        """Return whether it knows exactly these pages of each engine."""
        return self.held_S == [
            {block_hash(page.hash): (block_hash(page.parent) if page.parent else None, page.tokens) for page in pages}
            for pages in pages_S
        ]


@contextlib.asynccontextmanager
async def subscribed(client, start=0):
    subscriber = Subscriber(client, start)
    try:
        yield subscriber
    finally:
        subscriber.call.cancel()


@with_server(wall_clock=lambda: 1000.0)
async def test_subscriber_gets_a_snapshot_and_then_every_change(core, client):
    core.change_pages(stored(0, *A))
    core.change_pages(stored(1, *C), removed(0, A[2]))
    async with subscribed(client) as early:
        await early.read(2)
        assert early.knows(A[:2], C)
        (first, second) = early.batches
        assert [event.WhichOneof("data") for event in first.events] == ["cleared", "stored"]
        assert [event.WhichOneof("data") for event in second.events] == ["stored"]
        assert [(b.snapshot.index, b.snapshot.count, b.snapshot.blocks) for b in early.batches] == [
            (0, 2, 3),
            (1, 2, 3),
        ]
        core.change_pages(stored(0, *B[2:]))
        core.change_pages(CacheEvents(0, A[2:], (B[3].hash, B[2].hash)), stored(1, *A))
        await early.read(4)
        assert early.knows(A, (*C, *A))
        assert [len(batch.events) for batch in early.batches[2:]] == [1, 0, 2, 1]
        assert early.batches[-1].timestamp == pytest.approx(1000, abs=1)
        async with subscribed(client) as late:
            assert (await late.read(2)).held_S == early.held_S
            assert late.last_S == early.last_S
            core.flush_cache()
            assert (await early.read(2)).knows((), ()) and (await late.read(2)).knows((), ())


@with_server()
async def test_subscription_continues_from_every_number_that_is_kept(core, client):
    async with subscribed(client) as whole:
        await whole.read(2)
        begin = whole.last_S[0]
        for page in (*A, *B[2:]):
            core.change_pages(stored(1, page))
        await whole.read(10)
    assert begin is not None
    for start in range(begin, begin + 6):
        async with subscribed(client, start) as later:
            later.held_S[1] = dict.fromkeys(block_hash(page.hash) for page in (*A, *B))  # the parents of what it missed
            await later.call.initial_metadata()  # comes even if nothing was missed
            missed = 2 * (begin + 5 - start)
            await later.read(missed)
            for late, early in zip(later.batches, whole.batches[len(whole.batches) - missed :], strict=True):
                assert (late.sequence_number, late.events) == (early.sequence_number, early.events)
    for start in (1, begin - 1, begin + 6):
        with pytest.raises(grpc.aio.AioRpcError, match="start_sequence_number must be 0") as error:
            await client.engine.SubscribeKvEvents(pb.SubscribeKvEventsRequest(start_sequence_number=start)).read()
        assert error.value.code() == Code.OUT_OF_RANGE


@with_server()
async def test_long_snapshot_comes_in_chunks_that_end_at_the_last_number(core, client):
    texts = [pages_of([text] * 4) for text in range(10)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_events, "CHUNK_PAGES", 3)
        core.change_pages(stored(0, *(page for pages in texts[:7] for page in pages)))
        async with subscribed(client) as subscriber:
            await subscriber.read(4)
            numbers = [batch.sequence_number - subscriber.batches[2].sequence_number for batch in subscriber.batches]
            assert numbers == [-2, -1, 0, 0]
            assert [batch.snapshot.index for batch in subscriber.batches] == [0, 1, 2, 3]
            core.change_pages(stored(0, *texts[7]))
            await subscriber.read(2)
            assert subscriber.knows([page for pages in texts[:8] for page in pages], ())


@with_server()
async def test_subscriber_that_falls_behind_gets_data_loss(core, client):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_index, "LOG_PAGES", 8)
        async with subscribed(client) as slow:
            await slow.read(2)
            pages = pages_of(range(4000))
            for _ in range(2000):  # far more than the channel holds
                core.change_pages(stored(0, *pages[:4]))
            await asyncio.sleep(0.1)
            with pytest.raises(grpc.aio.AioRpcError, match="fell behind") as error:
                while await slow.call.read() is not grpc.aio.EOF:
                    pass
            assert error.value.code() == Code.DATA_LOSS


def test_subscriptions_end_with_the_server():
    async def main():
        with FakeCore() as core:
            async with asyncio.timeout(120), running_server(core) as (client, _, stop, task), subscribed(client) as one:
                await one.read(2)
                stop.set()
                with pytest.raises(grpc.aio.AioRpcError, match="has stopped") as error:
                    await one.call.read()
                assert error.value.code() == Code.UNAVAILABLE
                await task

    asyncio.run(main())


def test_hashes_are_signed_64_bit():
    assert block_hash(b"\xff" * 16) == -1 and block_hash(bytes(7) + b"\x05" + b"\xff" * 8) == 5
