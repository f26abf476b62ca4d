"""``gimbal serve`` as a process of its own: no tokenizer, SIGTERM under load, and a restart from what it saved."""

import asyncio
import contextlib
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import jax
import numpy as np
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb

from gimbal_jax.cli.serve.command import serve_checkpoint
from gimbal_jax.cli.serve.options import ServeOptions
from gimbal_jax.cli.serve.setup import Checkpoint
from gimbal_jax.client.client import GimbalClient
from gimbal_jax.client.records import ClientError, Unavailable
from gimbal_jax.scheduler.counts_file import load_counts, save_placement
from tests.e2e.rig import CONFIG, FOLDER, LAYERS, MODEL, TOP_K
from tests.serving.engine.fake_runner import FakeRunner
from tests.serving.statuses import per_engine

GIMBAL = Path(sys.executable).with_name("gimbal")
MESH = ("--devices", "cpu:4", "--dp", "2", "--tp", "2")
# Two shapes of steps to compile. Placements are decided when a test asks.
LIMITS = ("--max-rows", "2", "--token-budget", "8", "--tile", "8", "--page-size", "4", "--num-pages", "200")
PLACEMENT = ("--placement", "eplb", "--window-steps", "1000000")
START_S, END_S = 600, 600


@contextlib.asynccontextmanager
async def gimbal_serve(log: Path, *arguments: object):
    """A serving process and its client; killed at the end if it still runs."""
    command = [str(GIMBAL), "serve", *map(str, arguments), "--port", "0", *MESH, *LIMITS, *PLACEMENT]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        async with asyncio.timeout(START_S):
            while not (address := re.search(r"listening on (\S+)", log.read_text())):
                assert process.poll() is None, log.read_text()
                await asyncio.sleep(0.05)
            async with GimbalClient(address[1]) as client:
                while not await client.is_serving():
                    await asyncio.sleep(0.05)
        async with GimbalClient(address[1]) as client:
            yield process, client
    finally:
        process.kill()
        process.wait()


async def tokens_of(client, i: int, max_tokens: int, **options) -> tuple[list[int], str]:
    """Tokens of one stream, and how it ended: a finish reason, or a status and its text."""
    tokens = []
    prompt = [(7 * i + j) % MODEL.vocab_size for j in range(1, 6)]
    chunks = client.generate(token_ids=prompt, max_tokens=max_tokens, temperature=0.0, **options)
    try:
        async for chunk in chunks:
            tokens += chunk.token_ids
            reason = chunk.finish_reason
    except ClientError as error:
        reason = f"{error.code.name}: {error}"
    return tokens, reason


async def under_load(client, count: int, max_tokens: int) -> list[asyncio.Task]:
    """Start streams and return once the server has accepted all of them. Some may have ended by then."""
    tasks = [asyncio.create_task(tokens_of(client, i, max_tokens)) for i in range(count)]
    while (await client.status()).active_requests + sum(task.done() for task in tasks) < count:
        await asyncio.sleep(0.01)
    return tasks


async def exit_code(process: subprocess.Popen) -> int:
    return await asyncio.to_thread(process.wait, END_S)


async def first_life(tmp: Path) -> tuple[np.ndarray, tuple[list[int], str]]:
    """Starts from a placement, learns another, drains under SIGTERM and saves; returns the placement and one answer."""
    reversed_LE = np.tile(np.arange(MODEL.num_experts)[::-1], (LAYERS, 1))
    save_placement(tmp / "start.npz", reversed_LE, {"ranks": 4})
    files = "--placement-file", tmp / "start.npz", "--dump-counts", tmp / "counts", "--save", tmp / "saved"
    options = *files, "--compile-cache", tmp / "compiled", "--drain-timeout", END_S
    async with gimbal_serve(tmp / "first.log", FOLDER, *options) as (process, client):
        assert np.array_equal((await client.placement()).slot_of_expert_LE, reversed_LE)
        # Token ids are served; text, for which the checkpoint has no tokenizer, is refused.
        with pytest.raises(ClientError, match="no tokenizer"):
            await anext(client.generate("text"))
        with pytest.raises(grpc.aio.AioRpcError, match=r"text must be empty.*no tokenizer") as refused:
            await client.engine.Generate(pb.GenerateRequest(text="text")).read()
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        answer = await tokens_of(client, 1, 20)
        assert answer[1] == "length"

        await client.rebalance()
        while not (await client.status()).placement.experts_moved:
            await asyncio.sleep(0.05)
        placement_LE = (await client.placement()).slot_of_expert_LE
        assert not np.array_equal(placement_LE, reversed_LE)
        assert await tokens_of(client, 1, 20) == answer

        await client.save_counts(tmp / "fetched.npz")
        fetched, (dumped,) = load_counts(tmp / "fetched.npz"), map(load_counts, (tmp / "counts").iterdir())
        np.testing.assert_array_equal(dumped.counts_WLSE, fetched.counts_WLSE)
        np.testing.assert_array_equal(dumped.slot_of_expert_WLE, reversed_LE[None])
        np.testing.assert_array_equal(fetched.slot_of_expert_WLE, placement_LE[None])
        assert (dumped.meta["model"], dumped.meta["policy"], dumped.ranks) == ("base", "eplb", 4)

        tasks = await under_load(client, 48, 60)
        process.send_signal(signal.SIGTERM)
        while await client.is_serving():
            await asyncio.sleep(0.01)
        assert not all(task.done() for task in tasks)
        with pytest.raises(Unavailable, match="draining"):
            await anext(client.generate(token_ids=[1]))
        for tokens, end in await asyncio.gather(*tasks):
            assert (len(tokens), end) == (60, "length")
        assert await exit_code(process) == 0
    return placement_LE, answer


async def second_life(tmp: Path, placement_LE: np.ndarray, answer: tuple[list[int], str]) -> None:
    """Serves what was saved; its drain is too short for its streams."""
    options = "--drain-timeout", "0.5", "--compile-cache", tmp / "compiled", "--max-model-len", MODEL.max_position
    async with gimbal_serve(tmp / "second.log", tmp / "saved", *options) as (process, client):
        assert np.array_equal((await client.placement()).slot_of_expert_LE, placement_LE)
        assert await tokens_of(client, 1, 20) == answer

        tasks = await under_load(client, 100, 200)
        status = await client.status()
        assert status.steps.compiles_after_warmup == 0 < sum(per_engine(status, "tokens_computed"))
        counted = sum(per_engine(status, "tokens_computed")) * LAYERS * TOP_K
        while (await client.counts("total")).sum() < counted:  # they follow within a trace period
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        ends = [end for _, end in await asyncio.gather(*tasks)]
        cut_off = "UNAVAILABLE: the server stopped before the request ended"
        assert set(ends) <= {"length", cut_off}
        assert ends.count(cut_off) > 20
        assert await exit_code(process) == 0


@pytest.mark.process
def test_sigterm_under_load_and_restart_with_the_learned_placement(tmp_path):
    async def main():
        await second_life(tmp_path, *await first_life(tmp_path))

    asyncio.run(main())


class FailingRunner(FakeRunner):
    """Made like the real one; its devices fail in the third step."""

    weights = None

    def __init__(self, model, config, *_):
        super().__init__(model, config)
        self.steps_left = 2

    def warm_up(self, progress):
        progress(1, 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_engine_failure_ends_the_streams_and_the_process_with_an_error(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("gimbal_jax.serving.runtime.device_runner.DeviceRunner", FailingRunner)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    async def main():
        saved = tmp_path / "saved"
        options = ServeOptions(port=port, save=saved, num_pages=1, drain_timeout=END_S)
        served = asyncio.create_task(
            serve_checkpoint(Checkpoint(FOLDER, "base", MODEL), CONFIG, options, jax.devices())
        )
        end = "it never served"
        while not served.done():  # a new connection each time: a refused one waits before it tries again
            async with GimbalClient(f"127.0.0.1:{port}") as client:
                with contextlib.suppress(Unavailable):
                    if await client.is_serving():
                        _, end = await tokens_of(client, 1, 50)
                        break
            await asyncio.sleep(0.05)
        assert end == "UNAVAILABLE: RuntimeError: device lost"
        assert await served == 1
        assert not saved.exists()

    asyncio.run(main())
    assert "the engine failed: RuntimeError: device lost" in capsys.readouterr().err
