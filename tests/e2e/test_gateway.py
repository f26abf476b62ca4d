"""OpenAI's Python client, through the real gateway, against ``gimbal serve`` with TLS and keys on every port."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from gimbal_jax.client.client import GimbalClient
from gimbal_jax.model.demo_model import write_demo_model
from gimbal_jax.serving.network.ports import free_port
from tests.serving.rpc.test_tls import Authority

pytestmark = [
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program"),
    pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc"),
]
GIMBAL = Path(sys.executable).with_name("gimbal")
# Two shapes of steps to compile, those of test_bench.py.
SIZES = ("--devices", "cpu:1", "--max-rows", "2", "--token-budget", "8", "--tile", "8", "--num-pages", "256")
HTTP_KEY, GRPC_KEY = "http-key-of-alice", "grpc-key-of-bob-and-carol"
NAME = "org/tiny-moe"
PROMPT = " arena rugby catch"
MESSAGES: Any = [{"role": "user", "content": "rugby catch silver"}]
ORIGIN = "https://chat.example"
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
SCHEMA = {
    "type": "object",
    "properties": {"sport": {"enum": ["rugby", "judo"]}, "won": {"type": "boolean"}},
    "required": ["sport", "won"],
    "additionalProperties": False,
}
START_S, END_S = 600, 600


def gateways(server: subprocess.Popen) -> list[int]:
    """Process ids of the server's gateways that live."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            status = (folder / "status").read_text()
            command = (folder / "cmdline").read_bytes()
            if b"gateway.child" in command and f"\nPPid:\t{server.pid}\n" in status:
                found.append(int(folder.name))
    return found


class Rig:
    """The serving process, and clients of its two surfaces."""

    def __init__(self, folder: Path, compile_cache: Path) -> None:
        self.log, self.authority = folder / "log", Authority(folder, "ca")
        cert, key = self.authority.sign("server")
        write_demo_model(folder / "model")
        (folder / "http-keys").write_text(f"{HTTP_KEY} alice\n")
        (folder / "grpc-keys").write_text(f"{GRPC_KEY} bob\n")
        self.http_port = free_port()
        tls = ("--tls-cert", cert, "--tls-key", key, "--api-keys", folder / "grpc-keys")
        cache = ("--compile-cache", compile_cache)
        http = ("--http-port", self.http_port, "--http-api-key-file", folder / "http-keys", "--cors-origin", ORIGIN)
        command = (
            GIMBAL,
            "serve",
            folder / "model",
            "--port",
            0,
            "--served-model-name",
            NAME,
            *SIZES,
            *cache,
            *tls,
            *http,
            "--drain-timeout",
            END_S,
        )
        with self.log.open("w") as output:
            self.process = subprocess.Popen([*map(str, command)], stdout=output, stderr=subprocess.STDOUT)

    async def wait_until_ready(self) -> None:
        async with asyncio.timeout(START_S):
            while not (address := re.search(r"listening on \S+:(\d+)", self.log.read_text())):
                assert self.process.poll() is None, self.log.read_text()
                await asyncio.sleep(0.05)
            self.grpc_port = int(address[1])
            async with self.grpc() as client:
                while not await client.is_serving():
                    assert self.process.poll() is None, self.log.read_text()
                    await asyncio.sleep(0.05)

    def grpc(self) -> GimbalClient:
        return GimbalClient(f"localhost:{self.grpc_port}", api_key=GRPC_KEY, tls_ca=self.authority.pem)

    def http(self) -> httpx2.AsyncClient:
        context = ssl.create_default_context(cafile=str(self.authority.pem))
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # openssl's default authorities tell no key usage
        return httpx2.AsyncClient(base_url=f"https://localhost:{self.http_port}", verify=context, timeout=END_S)

    def openai(self, key: str = HTTP_KEY) -> openai.AsyncOpenAI:
        client = self.http()
        return openai.AsyncOpenAI(
            api_key=key, base_url=f"https://localhost:{self.http_port}/v1", http_client=client, max_retries=0
        )


async def check_completions_are_those_of_grpc(client: openai.AsyncOpenAI, grpc: GimbalClient) -> None:
    assert [model.id for model in (await client.models.list()).data] == [NAME]
    plain = [chunk async for chunk in grpc.generate(PROMPT, max_tokens=12, temperature=0.0)]
    text, tokens = "".join(chunk.text for chunk in plain), sum(len(chunk.token_ids) for chunk in plain)
    answer = await client.completions.create(model=NAME, prompt=PROMPT, max_tokens=12, temperature=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, plain[-1].finish_reason)
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens) == (tokens, 3)
    assert answer.model == NAME
    chat = await client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=12, temperature=0)
    spoken = "".join([chunk.text async for chunk in grpc.chat(MESSAGES, max_tokens=12, temperature=0.0)])
    assert chat.choices[0].message.content == spoken


async def check_streams(client: openai.AsyncOpenAI) -> None:
    """Chunks add up to the whole answer, and the usage comes last when asked for."""
    options: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    whole = await client.chat.completions.create(**options)
    stream = await client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert sum(1 for chunk in chunks if chunk.choices) > 1, "all tokens came in one chunk"
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    silent = [chunk async for chunk in await client.chat.completions.create(**options, stream=True)]
    assert all(chunk.usage is None for chunk in silent)


async def check_cached_tokens_are_told(client: openai.AsyncOpenAI) -> None:
    """The second time, all whole pages of a prompt but the last token's."""
    prompt = PROMPT * 12  # 36 tokens in pages of 16
    for cached in (0, 32):
        answer = await client.completions.create(model=NAME, prompt=prompt, max_tokens=2, temperature=0)
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        assert (details.cached_tokens if details else 0) == cached


async def check_sampling_parameters(client: openai.AsyncOpenAI) -> None:
    options: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 8, "temperature": 1.0}
    first, again, other = [await client.completions.create(**options, seed=seed) for seed in (1, 1, 2)]
    assert first.choices[0].text == again.choices[0].text != other.choices[0].text
    several = await client.completions.create(**options, seed=1, n=3)
    texts = {choice.index: choice.text for choice in several.choices}
    assert sorted(texts) == [0, 1, 2] and len({*texts.values()}) == 3 and texts[0] == first.choices[0].text
    word = first.choices[0].text.split()[2]
    stopped = await client.completions.create(**options, seed=1, stop=[word])
    assert stopped.choices[0].finish_reason == "stop"
    assert first.choices[0].text.startswith(stopped.choices[0].text) and word not in stopped.choices[0].text
    chat = await client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    assert chat.choices[0].logprobs is not None
    entries = chat.choices[0].logprobs.content
    assert entries is not None and "".join(entry.token for entry in entries) == chat.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3 and entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0


async def check_structured_output_and_tools(client: openai.AsyncOpenAI) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "match", "schema": SCHEMA, "strict": True}}
    options: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 60, "temperature": 1.0}
    answer = await client.chat.completions.create(**options, response_format=schema, seed=3)
    match = json.loads(answer.choices[0].message.content or "")
    assert match["sport"] in ("rugby", "judo") and match["won"] in (True, False) and len(match) == 2
    free = await client.chat.completions.create(**options | {"max_tokens": 4}, tools=[TOOL], tool_choice="auto")
    assert free.choices[0].finish_reason in ("length", "stop", "tool_calls")
    forced = await client.chat.completions.create(**options, tools=[TOOL], tool_choice="required", seed=4)
    message = forced.choices[0].message
    assert message.tool_calls or forced.choices[0].finish_reason == "length"


async def check_responses(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model=NAME, input="rugby catch", max_output_tokens=6, temperature=0)
    assert answer.output_text and answer.usage is not None and answer.usage.output_tokens == 6
    next_one = await client.responses.create(
        model=NAME, input="and judo", max_output_tokens=4, previous_response_id=answer.id
    )
    assert next_one.usage is not None and next_one.usage.input_tokens > answer.usage.input_tokens


async def check_errors(rig: Rig, client: openai.AsyncOpenAI) -> None:
    options: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 3}
    for key in ("wrong-key-of-nobody", GRPC_KEY):
        with pytest.raises(openai.AuthenticationError):
            await rig.openai(key).chat.completions.create(**options)
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        await client.chat.completions.create(**options | {"model": "gpt-9"})
    for bad in ({"temperature": -1}, {"max_tokens": 0}, {"top_p": 2}, {"n": 1000}):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**options | bad)
        assert refused.value.message, bad
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model=NAME, prompt=" rugby" * 5000, max_tokens=3)  # beyond the positions
    async with rig.http() as http:
        assert (await http.get("/v1/chat/completions")).status_code == 405
        bearer = {"authorization": f"Bearer {HTTP_KEY}"}
        answer = await http.post(
            "/v1/chat/completions", content=b"{", headers={**bearer, "content-type": "application/json"}
        )
        assert answer.status_code == 400
        too_long = b'{"model": "' + b"x" * (17 * 2**20) + b'"}'
        with contextlib.suppress(httpx2.TransportError):  # it may close while we send
            assert (await http.post("/v1/completions", content=too_long, headers=bearer)).status_code == 413


async def check_it_fetches_nothing_for_clients(rig: Rig, client: openai.AsyncOpenAI) -> None:
    """Neither tools nor pictures that a request names: they could be of the server's own network."""
    seen: list[str] = []

    def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(str(writer.get_extra_info("peername")))
        writer.close()

    server = await asyncio.start_server(note, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x.png"
    tool: Any = {"type": "mcp", "server_label": "x", "server_url": url, "require_approval": "never"}
    picture: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    async with server:
        with pytest.raises(openai.APIStatusError, match="Failed to connect to MCP"):
            await client.responses.create(model=NAME, input="x", tools=[tool])
        with pytest.raises(openai.APIStatusError):
            await client.chat.completions.create(model=NAME, messages=picture, max_tokens=2)
    assert not seen


async def check_clients_cannot_administer(rig: Rig) -> None:
    """A client's key is no key to the gateway's own administration: no other worker, no list of them."""
    async with rig.http() as http:
        for key in (HTTP_KEY, GRPC_KEY):
            bearer = {"authorization": f"Bearer {key}"}
            assert (await http.get("/workers", headers=bearer)).status_code == 401
            new = {"url": "grpc://127.0.0.1:1", "model_id": NAME}
            assert (await http.post("/workers", json=new, headers=bearer)).status_code == 401
            assert (await http.post("/flush_cache", headers=bearer)).status_code == 401


async def check_cross_origin(rig: Rig) -> None:
    async with rig.http() as http:
        for origin, allowed in ((ORIGIN, ORIGIN), ("https://evil.example", None)):
            asked = {"origin": origin, "access-control-request-method": "POST"}
            answer = await http.options("/v1/chat/completions", headers=asked)
            assert answer.headers.get("access-control-allow-origin") == allowed


async def check_a_killed_gateway_starts_again(rig: Rig, client: openai.AsyncOpenAI) -> None:
    (child,) = gateways(rig.process)
    assert HTTP_KEY.encode() not in Path(f"/proc/{child}/cmdline").read_bytes()
    os.kill(child, signal.SIGKILL)
    async with rig.grpc() as grpc, asyncio.timeout(END_S):
        while "the HTTP gateway ended" not in rig.log.read_text():
            await asyncio.sleep(0.01)
        assert [chunk async for chunk in grpc.generate(token_ids=[5], max_tokens=2)], "gRPC still serves"
    assert "the HTTP gateway ended (killed by SIGKILL); it starts again in 0.5 s" in rig.log.read_text()
    # Health may not show yet that the gateway is gone, so only an answer shows that it is back with its worker.
    answer = None
    async with asyncio.timeout(END_S):
        while answer is None:
            with contextlib.suppress(openai.APIError):
                answer = await client.completions.create(model=NAME, prompt=PROMPT, max_tokens=2)
            await asyncio.sleep(0.05)
    assert answer.usage is not None
    assert gateways(rig.process) not in ([], [child])


async def check_a_drain_lets_http_streams_end(rig: Rig, client: openai.AsyncOpenAI) -> None:
    options: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
    stream = await client.completions.create(**options, stream=True)
    first = await anext(stream)
    (child,) = gateways(rig.process)
    rig.process.send_signal(signal.SIGTERM)
    rest = [chunk async for chunk in stream]
    assert first.choices and rest[-1].choices[-1].finish_reason == "length"
    assert await asyncio.to_thread(rig.process.wait, END_S) == 0, rig.log.read_text()
    assert not Path(f"/proc/{child}").exists()


def test_openai_clients_are_served(tmp_path, compile_cache):
    async def main() -> None:
        await rig.wait_until_ready()
        async with rig.openai() as client, rig.grpc() as grpc:
            await check_completions_are_those_of_grpc(client, grpc)
            await check_streams(client)
            await check_cached_tokens_are_told(client)
            await check_sampling_parameters(client)
            await check_structured_output_and_tools(client)
            await check_responses(client)
            await check_errors(rig, client)
            await check_clients_cannot_administer(rig)
            await check_it_fetches_nothing_for_clients(rig, client)
            await check_cross_origin(rig)
            await check_a_killed_gateway_starts_again(rig, client)
            await check_a_drain_lets_http_streams_end(rig, client)

    rig = Rig(tmp_path, compile_cache)
    try:
        asyncio.run(main())
    finally:
        rig.process.kill()
        rig.process.wait()


def status_of(url: str) -> int | None:
    """Return the status, or None without an answer."""
    try:
        return httpx2.get(url).status_code
    except httpx2.TransportError:
        return None


def test_a_gateway_without_keys_rejects_administration_and_ends_with_its_server(tmp_path):
    write_demo_model(tmp_path / "model")
    port = free_port()
    code = f"""
import asyncio
from pathlib import Path
from gimbal_jax.serving.gateway.gateway import Gateway
from gimbal_jax.serving.gateway.config import GatewayConfig
asyncio.run(Gateway(GatewayConfig(Path({str(tmp_path / "model")!r}), {port}), print).run(1))
"""
    server = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + END_S
        while not (children := gateways(server)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        while status_of(f"http://127.0.0.1:{port}/health") != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert status_of(f"http://127.0.0.1:{port}/readiness") == 503  # there is no worker
        assert status_of(f"http://127.0.0.1:{port}/workers") == 401
    finally:
        server.kill()
        server.wait()
    while Path(f"/proc/{children[0]}/cmdline").exists() and Path(f"/proc/{children[0]}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.01)
