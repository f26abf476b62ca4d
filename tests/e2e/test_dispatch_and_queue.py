"""Late binding and priorities through real gRPC, the real server and the tiny model."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace

from gimbal_jax.client.client import GimbalClient
from gimbal_jax.config import DispatchConfig, QueueConfig, ServerConfig
from gimbal_jax.serving.core.core import EngineCore
from gimbal_jax.serving.engine.runner import Runner
from tests.e2e.rig import CONFIG, MODEL
from tests.serving.fake_server import LIMIT_S, running_server, until
from tests.serving.statuses import per_engine


def serve(
    runner: Runner, config: ServerConfig, test: Callable[[EngineCore, GimbalClient], Coroutine[None, None, None]]
) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), running_server(server) as (client, *_):
            await until(lambda: server.state == "serving")
            await test(server, client)

    runner.begin_counts()()
    server = EngineCore(MODEL, config, runner)
    server.start()
    try:
        asyncio.run(main())
    finally:
        server.stop()


async def generate(client: GimbalClient, name: str, done: list[str], **options) -> None:
    async for _ in client.generate(temperature=0.0, request_id=name, **options):
        pass
    done.append(name)


def test_late_binding_records_the_scores_of_every_decision(runner):
    async def test(server: EngineCore, client: GimbalClient) -> None:
        done: list[str] = []
        names = [f"r{i}" for i in range(24)]
        async with asyncio.TaskGroup() as group:
            for i, name in enumerate(names):
                group.create_task(generate(client, name, done, token_ids=range(1, 2 + i), max_tokens=8))
        assert sorted(done) == sorted(names)
        records = (await client.decisions()).dispatches
        assert sorted(record.request_id for record in records) == sorted(names)
        assert {record.decision.rule for record in records} == {"late"}
        assert {record.decision.engine for record in records} == {0, 1}
        for record in records:
            scores_S = record.decision.scores_S
            assert record.decision.engine is not None
            assert scores_S[record.decision.engine] == min(scores_S)
        status = await client.status()
        assert (status.central_queue, status.active_requests) == (0, 0)
        assert per_engine(status, "free_pages") == (CONFIG.engine.num_pages,) * 2

    serve(runner, replace(CONFIG, dispatch=DispatchConfig("late")), test)


def test_priorities_order_the_queue(runner, monkeypatch):
    stepping, all_in = threading.Event(), threading.Event()
    enqueue = runner.enqueue

    def held(plans, mark):
        pending = enqueue(plans, mark)

        def wait():
            stepping.set()
            assert all_in.wait(LIMIT_S)
            return pending()

        return wait

    async def test(server: EngineCore, client: GimbalClient) -> None:
        done: list[str] = []
        frontend = server._subscribers[0].__self__  # type: ignore[attr-defined]  # made by serve()
        async with asyncio.TaskGroup() as group:
            group.create_task(generate(client, "first", done, token_ids=[1], max_tokens=2, engine=0))
            await until(stepping.is_set)
            for name, priority in [("low", 5), ("none", 0), ("high", -5)]:
                options = {"token_ids": [1, 2], "max_tokens": 2, "engine": 0, "priority": priority}
                group.create_task(generate(client, name, done, **options))
            await until(lambda: frontend.active == 4)
            all_in.set()
        assert done == ["first", "high", "none", "low"]

    monkeypatch.setattr(runner, "enqueue", held)

    # One row: the three wait until the first has ended.
    config = replace(CONFIG, engine=replace(CONFIG.engine, max_rows=1), queue=QueueConfig("priority"))
    serve(runner, config, test)
