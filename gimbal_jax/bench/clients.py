"""Transports of a benchmark: gRPC with token ids, and OpenAI's /v1/completions with text.

All requests are greedy and generate their full number of tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb

from gimbal_jax.bench.replay import Call, OnTokens, SendFailed, Usage
from gimbal_jax.client.client import GimbalClient

Send = Callable[[Call, OnTokens], Awaitable[Usage]]


def grpc_send(client: GimbalClient) -> Send:
    """Return a sender over gRPC. It uses the raw stub, because chunks of ``GimbalClient`` would cost too much here."""

    async def send(call: Call, on_tokens: OnTokens) -> Usage:
        request = pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_ids=call.prompt),
            sampling_params=pb.SamplingParams(max_tokens=call.max_tokens, temperature=0.0, ignore_eos=True),
            stream=True,
        )
        complete: pb.GenerateComplete | None = None
        try:
            async for response in client.engine.Generate(request):
                if response.WhichOneof("response") == "chunk":
                    if count := len(response.chunk.token_ids):
                        on_tokens(count)
                else:
                    complete = response.complete
        except grpc.aio.AioRpcError as error:
            raise SendFailed(error.details() or error.code().name) from error
        if complete is None:
            raise SendFailed("the stream ended without a last message")
        return _checked(call, Usage(complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens))

    return send


def http_send(url: str, model: str, words: Mapping[int, str]) -> Send:
    """Return a sender over HTTP, with one connection for each request. ``words`` has the text of each token id.

    A message is a piece of text. Tokens without text, such as special ones, bring no message.
    """
    address = _address(url)

    async def send(call: Call, on_tokens: OnTokens) -> Usage:
        body = {
            "model": model,
            "prompt": "".join(words[id] for id in call.prompt),
            "max_tokens": call.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        usage: Mapping[str, Any] | None = None
        async with _http(address, "POST", "/v1/completions", body) as lines:
            async for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise SendFailed(_error_text(line[6:]))
                if event.get("choices") and event["choices"][0]["text"]:
                    on_tokens(1)
                usage = event.get("usage") or usage
        if usage is None:
            raise SendFailed("the stream ended without usage")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return _checked(call, Usage(usage["prompt_tokens"], usage["completion_tokens"], cached))

    return send


async def http_model(url: str) -> str:
    """Return the name of the server's first model. Raises SendFailed."""
    async with _http(_address(url), "GET", "/v1/models") as lines:
        text = b"".join([line async for line in lines])
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise SendFailed(f"/v1/models names no model: {text[:200].decode(errors='replace')}") from error


def _checked(call: Call, usage: Usage) -> Usage:
    if usage.output_tokens != call.max_tokens:
        raise SendFailed(f"{usage.output_tokens} output tokens instead of {call.max_tokens}")
    return usage


def _address(url: str) -> SplitResult:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url must be http://HOST:PORT or https://HOST:PORT, not {url}")
    return parts


@contextlib.asynccontextmanager
async def _http(
    address: SplitResult, method: str, path: str, body: Mapping[str, Any] | None = None
) -> AsyncIterator[AsyncIterator[bytes]]:
    """Yield the lines of the response body. Raises SendFailed for a status other than 200 or a broken connection.

    This client does as little as possible, because it shares the host with the server.
    """
    data = b"" if body is None else json.dumps(body).encode()
    headers = (
        f"Host: {address.netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        "Connection: close",
    )
    head = "\r\n".join((f"{method} {address.path.rstrip('/')}{path} HTTP/1.1", *headers, "", ""))
    secure = address.scheme == "https"
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await asyncio.open_connection(
            address.hostname, address.port or (443 if secure else 80), ssl=secure or None
        )
        writer.write(head.encode() + data)
        status, *fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        chunked = "transfer-encoding: chunked" in map(str.lower, fields)
        lines = _lines(reader, chunked)
        if status.split()[1] != "200":
            text = b"".join([line async for line in lines])
            raise SendFailed(f"{status.partition(' ')[2]}: {_error_text(text)}")
        yield lines
    except (OSError, EOFError, asyncio.LimitOverrunError) as error:  # EOFError: the response ended too early
        raise SendFailed(f"connection: {error}") from error
    finally:
        if writer is not None:
            writer.close()


async def _lines(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """Yield the lines of a body without line ends, as soon as each is complete."""
    if not chunked:
        async for line in reader:
            yield line.rstrip(b"\r\n")
        return
    rest = b""
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        rest += (await reader.readexactly(size + 2))[:-2]
        *lines, rest = rest.split(b"\n")
        for line in lines:
            yield line
    yield rest


def _error_text(body: bytes) -> str:
    """Return the message of an OpenAI error, or the first bytes of another body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return body[:200].decode(errors="replace")
