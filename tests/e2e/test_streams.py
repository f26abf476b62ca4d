"""Many clients over real gRPC against the tiny model, some of which leave early."""

import asyncio
import random

from gimbal_jax.client.records import ClientError
from gimbal_jax.serving.core.core import EngineCore
from tests.e2e.rig import CONFIG, MODEL, SOURCES
from tests.serving.fake_server import LIMIT_S, running_server, until
from tests.serving.statuses import per_engine

STREAMS = 64


async def stream(client, i: int, leave_after: int | None, draw: random.Random) -> str:
    """How it ended. One that leaves does so after some chunks, by closing the call, a timeout, or Abort."""
    chunks = client.generate(
        token_ids=[draw.randrange(MODEL.vocab_size) for _ in range(draw.randrange(1, 40))],
        max_tokens=draw.randrange(20, 50),
        temperature=draw.choice([0.0, 1.0]),
        request_id=f"stream {i}",
        timeout_s=0.05 * leave_after if leave_after and i % 3 == 0 else None,
    )
    taken = 0
    try:
        async for chunk in chunks:
            taken += 1
            if chunk.finish_reason is not None:
                return chunk.finish_reason
            if taken == leave_after and i % 3 == 1:
                await chunks.aclose()
                return "left"
            if taken == leave_after and i % 3 == 2:
                await client.abort(f"stream {i}")
    except ClientError as error:
        return error.code.name
    raise AssertionError("the stream ended without a last chunk")


def test_cancelled_streams_leave_no_pages(runner):
    draw = random.Random(4)
    leaving = set(draw.sample(range(STREAMS), STREAMS // 3))

    async def main(server):
        async with asyncio.timeout(LIMIT_S), running_server(server) as (client, *_):
            await until(lambda: server.state == "serving")
            ends = await asyncio.gather(
                *(stream(client, i, draw.randrange(1, 12) if i in leaving else None, draw) for i in range(STREAMS))
            )
            assert {end for i, end in enumerate(ends) if i not in leaving} == {"length"}
            left = [end for i, end in enumerate(ends) if i in leaving]
            assert len([end for end in left if end != "length"]) > STREAMS // 6
            assert set(left) <= {"length", "left", "abort", "DEADLINE_EXCEEDED"}

            await until(lambda: all(engine.idle for engine in server.engines))
            status = await client.status()
            assert per_engine(status, "free_pages") == (CONFIG.engine.num_pages,) * SOURCES
            assert status.active_requests == 0
            assert status.preemptions > 0
            frontend = server._subscribers[0].__self__  # made by serve()
            await until(lambda: frontend.dispatcher.view(0.0).compensation_S == (0, 0))

    runner.begin_counts()()
    server = EngineCore(MODEL, CONFIG, runner)
    server.start()
    try:
        asyncio.run(main(server))
    finally:
        server.stop()
