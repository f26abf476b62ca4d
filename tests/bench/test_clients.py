"""Both ways that a benchmark's requests travel, against servers that do what is written here."""

import asyncio
import contextlib
import json
import time

import pytest

from gimbal_jax.bench.clients import grpc_send, http_model, http_send
from gimbal_jax.bench.replay import Call, SendFailed, Usage, open_loop
from tests.serving.fake_server import with_server

CALL = Call(0.0, (1, 2, 3), 3, seed=0)
WORDS = {1: " one", 2: " two", 3: " three"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


@with_server()
async def test_grpc_counts_the_tokens_of_every_message(core, client):
    seen: list[int] = []
    assert await grpc_send(client)(CALL, seen.append) == Usage(3, 3, 0)
    assert sum(seen) == 3 and min(seen) >= 1, "a message may bring several"
    (request,) = core.submitted
    assert (request.prompt, request.sampling.temperature, request.sampling.max_tokens) == ((1, 2, 3), 0.0, 3)
    assert request.sampling.stop_token_ids == (), "no token ends it"


@with_server({"max_queue": 1, "paused": True})
async def test_grpc_refusals_are_failures_of_their_call_alone(core, client):
    def go_on(_: object) -> None:
        core.paused = False

    refused, good = sorted(
        await open_loop([CALL, Call(0.05, (5,), 2, seed=1)], grpc_send(client), on_done=go_on),
        key=lambda m: not m.error,
    )
    assert "waiting requests" in refused.error
    assert (good.input_tokens, good.output_tokens, good.error) == (3, 3, "")


class FakeHttp:
    """Answers every request with the pieces of ``body``; a number among them is a pause in seconds."""

    def __init__(self, *body: bytes | float, status="200 OK", chunked=True) -> None:
        self.body, self.status, self.chunked = body, status, chunked
        self.requests: list[tuple[str, dict]] = []

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length: ")[2].split()[0])
        self.requests.append((head.partition("\r\n")[0], json.loads(await reader.readexactly(length) or b"{}")))
        coding = "Transfer-Encoding: chunked\r\n" if self.chunked else ""
        writer.write(f"HTTP/1.1 {self.status}\r\n{coding}\r\n".encode())
        for piece in self.body:
            if isinstance(piece, float):
                await asyncio.sleep(piece)
            else:
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self.chunked else piece)
        if self.chunked:
            writer.write(b"0\r\n\r\n")
        writer.close()

    @contextlib.asynccontextmanager
    async def url(self):
        async with await asyncio.start_server(self._answer, "127.0.0.1", 0) as server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def event(text: str | None = None, **fields) -> bytes:
    choices = [] if text is None else [{"text": text, "index": 0}]
    return b"data: " + json.dumps({"choices": choices, **fields}).encode() + b"\n\n"


def through(server: FakeHttp, call=CALL):
    """The one measurement of a call."""

    async def run():
        async with asyncio.timeout(120), server.url() as url:
            return await open_loop([call], http_send(url, "small", WORDS))

    return asyncio.run(run())[0]


def test_http_measures_pieces_as_they_come():
    server = FakeHttp(0.1, event(" x"), 0.2, event(" y") + event(" z"), 0.1, event("", usage=None), event(usage=USAGE))
    began = time.monotonic()
    seen = through(server)
    took = time.monotonic() - began
    assert (seen.input_tokens, seen.output_tokens, seen.cached_tokens, seen.error) == (3, 3, 2, "")
    assert 0.1 <= seen.ttft_s < 0.1 + (took - 0.4) + 0.01, "what the machine adds in all is the most that it may add"
    first, second = seen.gaps_s
    assert first == pytest.approx(0.2, abs=took - 0.4 + 0.01) and second < took - 0.4 + 0.01
    assert 0.4 <= seen.e2e_s <= took
    ((line, body),) = server.requests
    assert line == "POST /v1/completions HTTP/1.1"
    assert body == {
        "model": "small",
        "prompt": " one two three",
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize("chunked", [True, False])
def test_http_lines_may_be_cut_anywhere(chunked):
    stream = event(" x") + b": a comment\n\n" + event(" ÿ") + event(" z", usage=USAGE) + event("") + b"data: [DONE]\n\n"
    for size in (1, 7, 50):
        pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
        seen = through(FakeHttp(*pieces, chunked=chunked))
        assert (seen.output_tokens, len(seen.gaps_s), seen.error) == (3, 2, ""), size


@pytest.mark.parametrize(
    ("server", "error"),
    [
        (FakeHttp(b'{"error": {"message": "no"}}', status="400 Bad Request"), "400 Bad Request: no"),
        (FakeHttp(b"<html>", status="502 Bad Gateway", chunked=False), "502 Bad Gateway: <html>"),
        (FakeHttp(event(" x"), event(error={"message": "lost"})), "lost"),
        (FakeHttp(event(" x")), "the stream ended without usage"),
        (FakeHttp(event(" x", usage=USAGE | {"completion_tokens": 2})), "2 output tokens instead of 3"),
    ],
)
def test_http_failures_say_how(server, error):
    assert through(server).error == error


def test_http_connections_that_break_or_are_refused():
    class Breaking(FakeHttp):
        async def _answer(self, reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\nff\r\n" + event(" x"))
            writer.close()

    assert through(Breaking()).error.startswith("connection: ")

    async def refused():
        async with FakeHttp().url() as url:
            pass
        return await open_loop([CALL], http_send(url, "small", WORDS))

    assert asyncio.run(refused())[0].error.startswith("connection: ")


def test_the_model_is_the_first_that_the_server_names():
    async def model(server: FakeHttp) -> str:
        async with server.url() as url:
            return await http_model(url + "/")

    server = FakeHttp(b'{"data": [{"id": "a"}, ', b'{"id": "b"}]}')
    assert asyncio.run(model(server)) == "a"
    assert server.requests[0][0] == "GET /v1/models HTTP/1.1"
    with pytest.raises(SendFailed, match=r"names no model: \{\}"):
        asyncio.run(model(FakeHttp(b"{}")))


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://host", "http://"])
def test_an_address_without_scheme_or_host_is_refused(url):
    with pytest.raises(ValueError, match="url must be http://HOST:PORT"):
        http_send(url, "small", WORDS)
