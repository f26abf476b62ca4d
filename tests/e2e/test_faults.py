"""Failures of clients, devices, checkpoints and ports, over real sockets and processes."""

import asyncio
import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from gimbal_jax.client.client import GimbalClient
from gimbal_jax.client.records import ClientError, Unavailable
from gimbal_jax.config import EngineConfig
from gimbal_jax.exceptions import DevicesLost
from gimbal_jax.scheduler.migration import plan_rounds
from tests.cli.test_main import gimbal
from tests.e2e.rig import CONFIG as REAL_CONFIG
from tests.e2e.rig import EXPERTS, FOLDER, RANKS
from tests.serving.core.ticked_core import CONFIG, new_core
from tests.serving.fake_server import LIMIT_S, running_server, until
from tests.serving.statuses import per_engine

ROOT = Path(__file__).parents[2]
LONG = replace(CONFIG, engine=EngineConfig(max_model_len=4096, page_size=16, num_pages=1024, max_rows=16))
START_S, END_S = 600, 600

# -- clients --------------------------------------------------------------------


def with_fake_devices(test, config=LONG, clock=time.monotonic, **options):
    """Run test(server, runner, client, port) against a server without a model, with its own engine thread."""

    async def main(server, runner):
        async with asyncio.timeout(LIMIT_S), running_server(server, clock=clock, **options) as (client, port, *_):
            await until(lambda: server.state == "serving")
            await test(server, runner, client, port)

    with new_core(config, clock) as (server, runner, _):
        server.start()
        asyncio.run(main(server, runner))


async def tokens_of(client, prompt, max_tokens, **options) -> list[int]:
    chunks = client.generate(token_ids=prompt, max_tokens=max_tokens, ignore_eos=True, **options)
    return [token async for chunk in chunks for token in chunk.token_ids]


def counted_up(prompt: int, count: int) -> list[int]:
    """Return the answer of the fake devices."""
    return [(prompt + i) % MODEL_OF_FAKES for i in range(1, count + 1)]


MODEL_OF_FAKES = 300
"""Size of the vocabulary of the fake devices."""


def test_a_client_that_does_not_read_delays_no_other_client():
    tokens = 3000

    async def test(server, runner, client, port):
        # Without probing for bandwidth the window stays at its 64 KiB, which 3,000 log probabilities overflow.
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.http2.bdp_probe", 0)]) as channel:
            engine = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            params = pb.SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=20)
            prompt = pb.TokenizedInput(input_ids=[7])
            call = engine.Generate(
                pb.GenerateRequest(request_id="slow", tokenized=prompt, sampling_params=params, stream=True)
            )
            got = list((await call.read()).chunk.token_ids)

            others = await asyncio.gather(*(tokens_of(client, [i], 200) for i in range(24)))
            assert others == [counted_up(i, 200) for i in range(24)]
            # Its own work is done and its pages are free, although it has not read: only tokens wait for it.
            await until(lambda: all(one.idle for one in server.engines))
            assert per_engine(server.status(), "free_pages") == (LONG.engine.num_pages,) * 2
            assert not call.done()
            largest = 0
            while (response := await call.read()) is not grpc.aio.EOF:
                got += response.chunk.token_ids
                largest = max(largest, len(response.chunk.token_ids))
            assert got == counted_up(7, tokens)
            assert largest > tokens / 6, "it was never waited for"

    with_fake_devices(test)


def test_clock_jumps_change_no_deadline_and_no_stream():
    jump = [0.0]

    async def test(server, runner, client, port):
        go_on = threading.Event()

        def hold(results):
            assert go_on.wait(LIMIT_S)

        runner.on_wait = hold
        began = time.monotonic()
        late = asyncio.create_task(tokens_of(client, [1], 50, timeout_s=1.0))
        patient = asyncio.create_task(tokens_of(client, [2], 50, timeout_s=LIMIT_S))
        await until(lambda: not all(engine.idle for engine in server.engines) or server._inbox)
        jump[0] += 30 * 86_400  # the server's clock goes forward a month, the wall clock back as far
        with pytest.raises(ClientError) as ended:
            await late
        assert ended.value.code == grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - began > 0.8
        go_on.set()
        assert await patient == counted_up(2, 50)
        # Traces are of the new time, so that dispatch goes by them again.
        await until(lambda: server.traces[0].time > jump[0])
        assert await tokens_of(client, [3], 5) == counted_up(3, 5)

    with_fake_devices(test, clock=lambda: time.monotonic() + jump[0], wall_clock=lambda: time.time() - jump[0])


# -- devices ----------------------------------------------------------------------


@contextlib.asynccontextmanager
async def faulty_serve(log: Path, fault: str, *arguments: object):
    """Yield a process that serves on faulty devices, and its client. Kill it at the end if it still runs."""
    command = [sys.executable, "-m", "tests.e2e.faulty_serve", fault, "serve", str(FOLDER), "--port", "0"]
    with log.open("w") as output:
        process = subprocess.Popen([*command, *map(str, arguments)], stdout=output, stderr=output, cwd=ROOT)
    try:
        async with asyncio.timeout(START_S):
            while not (address := re.search(r"listening on (\S+)", log.read_text())):
                assert process.poll() is None, log.read_text()
                await asyncio.sleep(0.02)
            async with GimbalClient(address[1]) as client:
                yield process, client
    finally:
        process.kill()
        process.wait()


async def serving(client) -> None:
    while not await client.is_serving():
        await asyncio.sleep(0.02)


async def end_of(client, prompt, max_tokens) -> str:
    try:
        await tokens_of(client, prompt, max_tokens)
    except ClientError as error:
        return f"{error.code.name}: {error}"
    return "ok"


@pytest.mark.process
@pytest.mark.parametrize(
    ("fault", "arguments", "reason"),
    [
        # The rest of what jax says is for the log.
        ("out of memory", (), "JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.5GiB."),
        (
            "lost experts",
            ("--devices", "cpu:2", "--dp", 2, "--placement", "eplb", "--window-steps", 50),
            "DevicesLost: the experts of MoE layer 0 were lost while they moved",
        ),
    ],
)
def test_devices_that_fail_end_all_requests_and_the_process(tmp_path, fault, arguments, reason):
    log = tmp_path / "log"

    async def main():
        async with faulty_serve(log, fault, *arguments) as (process, client):
            await serving(client)
            running = [asyncio.create_task(end_of(client, [i], 240)) for i in range(4)]
            while (await client.status()).active_requests < 4:
                await asyncio.sleep(0.01)
            ends = await asyncio.gather(end_of(client, range(1, 9), 240), *running)
            assert set(ends) == {f"UNAVAILABLE: {reason}"}
            with contextlib.suppress(Unavailable):
                while await client.is_serving():
                    await asyncio.sleep(0.02)
            assert await asyncio.to_thread(process.wait, END_S) == 1

    asyncio.run(main())
    said = log.read_text()
    assert f"the engine failed: {reason}" in said
    assert "Traceback (most recent call last)" in said


@pytest.mark.process
def test_sigterm_while_loading_ends_the_process(tmp_path):
    log = tmp_path / "log"
    command = [sys.executable, "-m", "tests.e2e.faulty_serve", "slow loading", "serve", str(FOLDER), "--port", "0"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)
    try:
        deadline = time.monotonic() + START_S
        while "loading" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 128 + signal.SIGINT
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in log.read_text()


@pytest.mark.process
def test_sigterm_during_warm_up_ends_the_process(tmp_path):
    async def main():
        async with faulty_serve(tmp_path / "log", "slow warm-up") as (process, client):
            assert not await client.is_serving()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, END_S) == 0

    asyncio.run(main())
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.process
def test_a_second_sigterm_ends_the_drain(tmp_path):
    async def main():
        async with faulty_serve(tmp_path / "log", "none", "--drain-timeout", 600) as (process, client):
            await serving(client)
            stream = asyncio.create_task(end_of(client, [1], 200))
            while (await client.status()).active_requests < 1:
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            while await client.is_serving():
                await asyncio.sleep(0.01)
            assert not stream.done()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, END_S) == -signal.SIGTERM
            assert "UNAVAILABLE" in await stream

    asyncio.run(main())


@pytest.fixture
def rounds(runner):
    wanted_E = np.roll(np.arange(EXPERTS, dtype=np.int32), 1)
    return list(plan_rounds(runner.slot_of_expert_LE[0], wanted_E, RANKS, REAL_CONFIG.placement.rows_per_pair))


def test_a_migration_that_cannot_start_changes_nothing(runner, rounds, monkeypatch):
    def fail(*_):
        raise RuntimeError("no link")

    slots_LE, experts = runner.slot_of_expert_LE.copy(), runner._experts_of(0)
    for where, name in ((runner, "_move_experts"), (jax, "device_put")):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, fail)
            with pytest.raises(RuntimeError, match="no link"):
                runner.migrate(0, rounds[0])
        np.testing.assert_array_equal(runner.slot_of_expert_LE, slots_LE)
        np.testing.assert_array_equal(np.asarray(runner._device_slots), slots_LE)
        assert all(now is before for now, before in zip(runner._experts_of(0), experts, strict=True))


def test_a_migration_that_loses_weights_raises_devices_lost(runner, rounds, monkeypatch):
    copies = tuple(jnp.copy(array) for array in runner._experts_of(0))

    def lose(experts, *_):
        experts[0].delete()
        raise RuntimeError("link down")

    monkeypatch.setattr(runner, "_experts_of", lambda layer: copies)
    monkeypatch.setattr(runner, "_move_experts", lose)
    with pytest.raises(DevicesLost, match=r"experts of MoE layer 0 were lost.*link down"):
        runner.migrate(0, rounds[0])


# -- checkpoints --------------------------------------------------------------------


def truncated(name, size):
    def damage(folder):
        (folder / name).write_bytes((folder / name).read_bytes()[:size])

    return damage


def text(name, content):
    def damage(folder):
        (folder / name).write_bytes(content)

    return damage


def tensors(change):
    def damage(folder):
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors")

    return damage


def of_tokenizer(name, content):
    def damage(folder):
        empty = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "version": "1.0", "added_tokens": []}
        (folder / "tokenizer.json").write_text(json.dumps(empty))
        (folder / name).write_bytes(content)

    return damage


def no_file(name):
    def damage(folder):
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


NORM = "model.norm.weight"
DAMAGES = {
    "weights truncated": (truncated("model.safetensors", 50_000), r"model\.safetensors is damaged or truncated"),
    "weights no file": (no_file("model.safetensors"), r"model\.safetensors cannot be read"),
    "tensor missing": (tensors(lambda t: t.pop(NORM)), rf"checkpoint: missing tensors: {NORM}"),
    "tensor misshapen": (tensors(lambda t: t.update({NORM: t[NORM][:-1]})), rf"checkpoint: {NORM} has shape \(31,\)"),
    "index truncated": (text("model.safetensors.index.json", b'{"weight_map": {'), r"index\.json is not an index"),
    "index of numbers": (
        text("model.safetensors.index.json", b'{"weight_map": {"a": 3}}'),
        r"index\.json does not name a file of its folder",
    ),
    "index of elsewhere": (
        text("model.safetensors.index.json", b'{"weight_map": {"a": "../b"}}'),
        r"index\.json does not name a file of its folder",
    ),
    "configuration truncated": (truncated("config.json", 100), r"checkpoint/config\.json is not JSON"),
    "configuration no text": (text("config.json", b"\xff\xfe{"), r"checkpoint/config\.json is not JSON"),
    "defaults": (text("generation_config.json", b"["), r"checkpoint/generation_config\.json is not JSON"),
    "tokenizer truncated": (of_tokenizer("tokenizer.json", b'{"model":'), r"tokenizer\.json cannot be used"),
    "tokenizer empty": (of_tokenizer("tokenizer.json", b"{}"), r"tokenizer\.json cannot be used"),
    "tokenizer no text": (of_tokenizer("tokenizer.json", b"\xff\xfe"), r"tokenizer\.json cannot be used"),
    "tokens": (of_tokenizer("tokenizer_config.json", b"[]"), r"tokenizer_config\.json cannot be used"),
    "template": (of_tokenizer("chat_template.jinja", b"{% for %}"), r"chat_template\.jinja cannot be used"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_rejected_in_one_line_with_its_file(tmp_path, damage, message):
    folder = tmp_path / "checkpoint"
    shutil.copytree(FOLDER, folder)
    damage(folder)
    result = gimbal("serve", folder, "--port", 0)
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(message, line), line
    assert "Traceback" not in result.output and "listening" not in result.output


# -- ports --------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--port", "--operators-port"])
def test_a_taken_port_is_reported(option):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = gimbal("serve", FOLDER, "--port", 0, option, port)
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert str(port) in line
