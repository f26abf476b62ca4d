"""vllm.grpc.engine.VllmEngine through a real socket, with the published stubs."""

import asyncio
import contextlib
import dataclasses
import hashlib
import io
import math
import time
import zipfile

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from gimbal_jax import __version__
from gimbal_jax.client.client import GimbalClient
from gimbal_jax.config import EngineConfig
from gimbal_jax.exceptions import InvalidField
from gimbal_jax.serving.engine.prefix import page_hashes
from gimbal_jax.serving.frontend.frontend import Frontend
from gimbal_jax.serving.rpc.engine_service import CHUNK_BYTES, EngineService
from gimbal_jax.serving.rpc.model_files import load_model_files
from tests.serving.engine.cache_events import pages_of, stored
from tests.serving.fake_server import (
    CONFIG,
    MODEL,
    NO_FILES,
    FakeCore,
    running_server,
    trace,
    until,
    with_server,
    write_model_folder,
)

Code = grpc.StatusCode
NO_CACHE = dataclasses.replace(CONFIG, engine=dataclasses.replace(CONFIG.engine, prefix_cache=False))


def request(prompt=(5,), *, stream=True, id="", params=None, **fields):
    params = {"max_tokens": 3, **(params or {})}
    return pb.GenerateRequest(
        request_id=id,
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(**params),
        stream=stream,
        **fields,
    )


async def responses(client, message, **options):
    return [response async for response in client.engine.Generate(message, **options)]


async def rejected(client, message, code, text):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await responses(client, message)
    assert (error.value.code(), text in error.value.details()) == (code, True), error.value


@with_server()
async def test_a_stream_has_chunks_and_a_last_message(core, client):
    *chunks, last = await responses(client, request())
    chunks = [chunk.chunk for chunk in chunks]
    assert [token for chunk in chunks for token in chunk.token_ids] == [6, 7, 8]
    assert [chunk.completion_tokens for chunk in chunks][-1] == 3
    assert all(chunk.prompt_tokens == 1 and not chunk.HasField("output_logprobs") for chunk in chunks)
    complete = last.complete
    assert (list(complete.output_ids), complete.finish_reason) == ([6, 7, 8], "length")
    assert (complete.prompt_tokens, complete.completion_tokens) == (1, 3)
    assert complete.WhichOneof("matched_stop") is None


@with_server()
async def test_without_streaming_there_is_one_message(core, client):
    [response] = await responses(client, request(stream=False))
    assert list(response.complete.output_ids) == [6, 7, 8]


@with_server()
async def test_stop_token_is_reported(core, client):
    *_, last = await responses(client, request(params={"stop_token_ids": [7]}))
    complete = last.complete
    assert (list(complete.output_ids), complete.finish_reason, complete.matched_token_id) == ([6], "stop", 7)
    *_, last = await responses(client, request(prompt=(297,)))
    assert (list(last.complete.output_ids), last.complete.matched_token_id) == ([298], 299)


@with_server()
async def test_logprobs_have_the_requested_alternatives(core, client):
    [response] = await responses(client, request(stream=False, params={"logprobs": 2}))
    logprobs = response.complete.output_logprobs
    assert (list(logprobs.token_ids), list(logprobs.token_logprobs)) == ([6, 7, 8], [-0.5] * 3)
    assert [(list(top.token_ids), list(top.values)) for top in logprobs.top_logprobs] == [([0, 1], [0.0, -1.0])] * 3
    *chunks, _ = await responses(client, request(params={"logprobs": 0}))
    assert [list(chunk.chunk.output_logprobs.token_ids) for chunk in chunks] == [
        list(chunk.chunk.token_ids) for chunk in chunks
    ]
    assert not chunks[0].chunk.output_logprobs.top_logprobs


@with_server({"paused": True})
async def test_abort_ends_a_stream(core, client):
    stream = asyncio.create_task(responses(client, request(id="a")))
    await until(lambda: core.live)
    core.step()
    await client.engine.Abort(pb.AbortRequest(request_ids=["a", "unknown"]))
    *_, last = await stream
    assert (last.complete.finish_reason, list(last.complete.output_ids)) == ("abort", [6])
    assert core.live == []


@with_server({"paused": True})
async def test_a_deadline_cancels_the_request(core, client):
    await client.is_serving()  # connects, so the request arrives before its deadline
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await responses(client, request(), timeout=1.0)
    assert error.value.code() == Code.DEADLINE_EXCEEDED
    await until(lambda: core.cancelled and not core.live)


@with_server({"paused": True, "max_queue": 1})
async def test_rejections_have_their_status(core, client):
    stream = asyncio.create_task(responses(client, request(id="a")))
    await until(lambda: core.live)
    await rejected(client, request(id="a"), Code.ALREADY_EXISTS, "request_id 'a'")
    await rejected(client, request(), Code.RESOURCE_EXHAUSTED, "waiting requests")
    await rejected(client, request(prompt=[]), Code.INVALID_ARGUMENT, "tokenized.input_ids must hold at least one")
    await rejected(client, request(data_parallel_rank=2), Code.INVALID_ARGUMENT, "data_parallel_rank must be in [0, 1]")
    await rejected(client, request(kv_transfer_params_json="{}"), Code.UNIMPLEMENTED, "kv_transfer_params_json")
    await rejected(client, pb.GenerateRequest(text="hi"), Code.INVALID_ARGUMENT, "no tokenizer")
    core.fail(core.live[0], "device lost")
    with pytest.raises(grpc.aio.AioRpcError, match="device lost") as error:
        await stream
    assert error.value.code() == Code.INTERNAL


@with_server({"state": "warming"})
async def test_warming_server_is_unavailable(core, client):
    await rejected(client, request(), Code.UNAVAILABLE, "warming")


@with_server()
async def test_data_parallel_rank_pins_the_engine(core, client):
    for engine in (1, 1, 0):
        await responses(client, request(data_parallel_rank=engine))
    assert [(request.engine, request.sequence) for request in core.submitted] == [(1, 1), (1, 2), (0, 1)]


@with_server(new_seed=iter([41, 42]).__next__)
async def test_unset_seed_is_new_each_time(core, client):
    for params in ({}, {}, {"seed": 7}):
        await responses(client, request(params=params))
    assert [request.sampling.seed for request in core.submitted] == [41, 42, 7]


@with_server(wall_clock=lambda: 1.5)
async def test_info_describes_model_and_server(core, client):
    model = await client.engine.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.vocab_size, model.max_context_length, model.max_req_input_len) == (300, 64, 63)
    assert (model.served_model_name, model.model_path, model.tokenizer_path) == ("fake", "/models/fake", "")
    assert (list(model.eos_token_ids), model.pad_token_id, model.is_generation) == ([299], 298, True)
    await responses(client, request())
    server = await client.engine.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.data_parallel_size, server.block_size, server.max_num_seqs) == (2, 4, 16)
    assert (server.last_receive_timestamp, server.is_paused, server.active_requests) == (1.5, False, 0)
    assert server.uptime_seconds > 0


@with_server(wall_clock=lambda: 0)
async def test_loads_come_from_the_traces(core, client):
    core.traces = (trace(0, running=2, waiting=1, prefill=40, kv_use=0.5), trace(1))
    response = await client.engine.GetLoads(pb.GetLoadsRequest())
    assert (response.timestamp, response.version) == (
        "1970-01-01T00:00:00+00:00",
        __version__,
    )
    first, second = response.loads
    assert (first.num_running_reqs, first.num_waiting_reqs, first.num_total_reqs) == (2, 1, 3)
    assert (first.token_usage, first.num_used_tokens, first.max_total_num_tokens) == (0.5, 64, 128)
    assert (first.utilization, first.num_waiting_uncached_tokens, second.dp_rank) == (0.25, 40, 1)
    await responses(client, request(data_parallel_rank=1, params={"max_tokens": 20}))
    rates: list[float] = []
    while not any(rates):  # of the last whole second
        await asyncio.sleep(0.05)
        rates = [load.gen_throughput for load in (await client.engine.GetLoads(pb.GetLoadsRequest())).loads]
    assert rates[0] == 0 and rates[1] > 0
    response = await client.engine.GetLoads(pb.GetLoadsRequest(dp_rank=1))
    assert [load.dp_rank for load in response.loads] == [1]
    with pytest.raises(grpc.aio.AioRpcError, match=r"dp_rank must be in \[0, 1\], got 2"):
        await client.engine.GetLoads(pb.GetLoadsRequest(dp_rank=2))


@with_server()
async def test_health_check_follows_the_state(core, client):
    assert (await client.engine.HealthCheck(pb.HealthCheckRequest())).healthy
    core.state = "draining"
    response = await client.engine.HealthCheck(pb.HealthCheckRequest())
    assert (response.healthy, response.message) == (False, "draining")


def test_the_tokenizer_comes_in_checked_chunks(tmp_path):
    write_model_folder(tmp_path)
    noise = " ".join(hashlib.sha256(bytes([i % 256, i // 256])).hexdigest() for i in range(2000))
    (tmp_path / "merges.txt").write_text(noise)  # makes the archive longer than a message

    async def main(core):
        async with asyncio.timeout(120), running_server(core, load_model_files(tmp_path)) as (client, *_):
            chunks = [chunk async for chunk in client.engine.GetTokenizer(common_pb2.GetTokenizerRequest())]
            *_, last = await responses(client, pb.GenerateRequest(text="a", stream=True))
            info = await client.engine.GetModelInfo(pb.GetModelInfoRequest())
        data = b"".join(chunk.data for chunk in chunks)
        assert len(chunks) > 1 and all(len(chunk.data) <= CHUNK_BYTES for chunk in chunks)
        assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.read("tokenizer.json") == (tmp_path / "tokenizer.json").read_bytes()
            assert archive.read("merges.txt").decode() == noise
        assert last.complete.completion_tokens == 63
        assert info.default_sampling_params_json == '{"temperature": 0.6, "top_k": 20}'

    with FakeCore() as core:
        asyncio.run(main(core))


@with_server()
async def test_no_tokenizer_is_not_found(core, client):
    with pytest.raises(grpc.aio.AioRpcError, match="no tokenizer") as error:
        await client.engine.GetTokenizer(common_pb2.GetTokenizerRequest()).read()
    assert error.value.code() == Code.NOT_FOUND


@with_server()
async def test_embed_is_unimplemented(core, client):
    with pytest.raises(grpc.aio.AioRpcError, match="Embed: ") as error:
        await client.engine.Embed(pb.EmbedRequest())
    assert error.value.code() == Code.UNIMPLEMENTED


@with_server()
async def test_choices_have_their_index(core, client):
    for stream in (True, False):
        messages = await responses(client, request(stream=stream, params={"n": 3, "logprobs": 0}))
        tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for message in messages:
            if message.WhichOneof("response") == "chunk":
                tokens[message.chunk.index] += message.chunk.token_ids
        completes = {m.complete.index: m.complete for m in messages if m.HasField("complete")}
        assert sorted(completes) == [0, 1, 2]
        for index, complete in completes.items():
            assert (list(complete.output_ids), complete.completion_tokens) == ([6, 7, 8], 3)
            assert list(complete.output_logprobs.token_ids) == [6, 7, 8]
            assert not stream or tokens[index] == [6, 7, 8]
        assert stream or len(messages) == 3


@with_server({"paused": True})
async def test_abort_and_cancellation_end_all_choices(core, client):
    stream = asyncio.create_task(responses(client, request(id="a", params={"n": 3})))
    await until(lambda: len(core.live) == 3)
    await client.engine.Abort(pb.AbortRequest(request_ids=["a"]))
    assert [message.complete.finish_reason for message in await stream] == ["abort"] * 3
    call = client.engine.Generate(request(params={"n": 3}))
    reading = asyncio.create_task(call.read())
    await until(lambda: len(core.live) == 3)
    call.cancel()
    await until(lambda: not core.live)
    await asyncio.gather(reading, return_exceptions=True)


@with_server()
async def test_prompt_logprobs_come_first_and_at_the_end(core, client):
    first, *others, last = await responses(client, request((5, 6, 7), params={"prompt_logprobs": 2}))
    for message in (first.chunk, last.complete):
        logprobs = message.input_logprobs
        assert list(logprobs.token_ids) == [5, 6, 7]
        assert [(entry.HasField("value"), entry.value) for entry in logprobs.token_logprobs] == [
            (False, 0.0),
            (True, -1.0),
            (True, -2.0),
        ]
        assert [list(top.token_ids) for top in logprobs.top_logprobs] == [[], [0, 1], [0, 1]]
    assert not any(other.chunk.HasField("input_logprobs") for other in others)
    [response] = await responses(client, request((5, 6), stream=False, params={"prompt_logprobs": 0}))
    assert len(response.complete.input_logprobs.token_logprobs) == 2
    assert not response.complete.input_logprobs.top_logprobs


def test_stop_string_ends_the_output(tmp_path):
    files = load_model_files(write_model_folder(tmp_path))
    tokenizer = files.tokenizer
    assert tokenizer is not None
    [first] = tokenizer.encode("a")

    async def main(core):
        async with asyncio.timeout(120), running_server(core, files) as (client, *_):
            for stream in (True, False):
                messages = await responses(
                    client,
                    request(
                        (first,),
                        stream=stream,
                        params={"stop": ["de"], "max_tokens": 9},
                    ),
                )
                complete = messages[-1].complete
                assert tokenizer.decode(complete.output_ids) == "bcde"
                assert (complete.finish_reason, complete.matched_stop_str) == ("stop", "de")
            # Special tokens are part of the text unless they are skipped.
            message = request((255,), params={"stop": ["|start|><|end"], "max_tokens": 9})
            assert (await responses(client, message))[-1].complete.completion_tokens == 2
            message.sampling_params.skip_special_tokens = True
            assert (await responses(client, message))[-1].complete.finish_reason == "length"

    with FakeCore() as core:
        asyncio.run(main(core))


@with_server({"config": NO_CACHE})
async def test_without_a_prefix_cache_there_are_no_hashes_flushes_or_events(core, client):
    await responses(client, request(range(9)))
    assert core.submitted[0].page_hashes == ()
    response = await client.engine.FlushCache(common_pb2.FlushCacheRequest(timeout_s=1))
    assert response.success and "no prefix cache" in response.message and core.flushes == 0
    with pytest.raises(grpc.aio.AioRpcError, match="SubscribeKvEvents: ") as error:
        await client.engine.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()).read()
    assert error.value.code() == Code.UNIMPLEMENTED


@with_server()
async def test_every_message_has_the_cached_tokens(core, client):
    prompt = list(range(9))
    for params in ({}, {"prompt_logprobs": 0}, {"n": 2, "temperature": 1.0}):
        await responses(client, request(prompt, params=params))
    hashes = page_hashes(prompt, 4)
    assert [request.page_hashes for request in core.submitted] == [hashes, (), hashes, hashes]
    for engine in range(2):
        core.change_pages(stored(engine, *pages_of(prompt)))
    for stream in (True, False):
        for message in await responses(client, request(prompt, stream=stream)):
            assert (message.chunk.cached_tokens or message.complete.cached_tokens) == 8
    chunks = [chunk async for chunk in client.generate(token_ids=prompt, max_tokens=3)]
    assert {chunk.cached_tokens for chunk in chunks} == {8}
    core.traces = (trace(0), trace(1))
    for _ in range(2):
        await responses(client, request(prompt, data_parallel_rank=1))
    rates = [load.cache_hit_rate for load in (await client.engine.GetLoads(pb.GetLoadsRequest())).loads]
    ran_S = [[request.engine for request in core.submitted].count(engine) for engine in range(2)]
    assert sum(rate * ran for rate, ran in zip(rates, ran_S, strict=True)) == pytest.approx(5 * 8 / 9)


@with_server({"paused": True})
async def test_a_flush_waits_for_requests_and_engines(core, client):
    core.change_pages(stored(0, *pages_of(range(8))), stored(1, *pages_of(range(4))))
    stream = client.engine.Generate(request(stream=True))
    await until(lambda: core.live)
    response = await client.engine.FlushCache(common_pb2.FlushCacheRequest(timeout_s=0.05))
    assert (response.success, core.flushes) == (False, 0) and "1 requests are running" in response.message
    flush = asyncio.ensure_future(client.engine.FlushCache(common_pb2.FlushCacheRequest(timeout_s=10)))
    await asyncio.sleep(0.05)
    assert not flush.done()
    stream.cancel()
    response = await flush
    assert (response.success, response.message) == (True, "0 pages are in the prefix cache")
    assert core.held_S == [{}, {}] and core.flushes == 1
    assert (await client.engine.FlushCache(common_pb2.FlushCacheRequest())).success


@with_server()
async def test_a_flush_needs_a_valid_timeout(core, client):
    for timeout_s in (-1, math.nan, math.inf):
        with pytest.raises(grpc.aio.AioRpcError, match="timeout_s must be finite and at least 0") as error:
            await client.engine.FlushCache(common_pb2.FlushCacheRequest(timeout_s=timeout_s))
        assert error.value.code() == Code.INVALID_ARGUMENT


@with_server()
async def test_no_profiler_is_a_precondition(core, client):
    for call in (
        client.engine.StartProfile(common_pb2.StartProfileRequest()),
        client.engine.StopProfile(common_pb2.StopProfileRequest()),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="start it with --profile-dir") as error:
            await call
        assert error.value.code() == Code.FAILED_PRECONDITION


class FakeProfiler:
    def start(self, request):
        return common_pb2.ProfileResponse(success=True, message=request.output_dir)

    def stop(self):
        raise InvalidField("nothing was started")


class FakeConstraints:
    def compile(self, params):
        if params.regex == "crash":
            raise RuntimeError("secret of the library")
        return object


@contextlib.asynccontextmanager
async def engine_server(core, **parts):
    """The engine service alone, with parts of its own."""
    server = grpc.aio.server()
    service = EngineService(core, Frontend(core, time.monotonic), NO_FILES, lambda: 1, time.time, **parts)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with asyncio.timeout(120), GimbalClient(f"127.0.0.1:{port}") as client:
            yield client
    finally:
        await server.stop(0)


def test_unexpected_errors_are_logged_and_not_sent(caplog):
    async def main(core):
        async with engine_server(core, profiler=FakeProfiler(), constraints=FakeConstraints()) as client:
            response = await client.engine.StartProfile(common_pb2.StartProfileRequest(output_dir="x"))
            assert (response.success, response.message) == (True, "x")
            with pytest.raises(grpc.aio.AioRpcError, match="nothing was started") as error:
                await client.engine.StopProfile(common_pb2.StopProfileRequest())
            assert error.value.code() == Code.INVALID_ARGUMENT

            await responses(client, request(params={"regex": "good"}))
            assert type(core.submitted[-1].grammar) is object
            # The log has the error, the client gets no details.
            await rejected(client, request(params={"regex": "crash"}), Code.INTERNAL, "internal error")
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await responses(client, request(params={"regex": "crash"}))
            assert "secret" not in str(error.value) and "secret of the library" in caplog.text

    with FakeCore() as core:
        asyncio.run(main(core))


def test_a_reader_that_takes_nothing_delays_no_other_stream():
    """Its flow-control window fills up, the server keeps its tokens, and other streams continue."""
    config = dataclasses.replace(CONFIG, engine=EngineConfig(max_model_len=8192, page_size=4, num_pages=4096))
    window = [("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)]

    async def main(core):
        async with (
            asyncio.timeout(120),
            running_server(core) as (client, port, *_),
            grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=window) as channel,
        ):
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            params = {"max_tokens": 1500, "logprobs": 20, "ignore_eos": True}
            call = stub.Generate(request(params=params))
            chunks = [(await call.read()).chunk]
            quick = await responses(client, request(params={"max_tokens": 500, "ignore_eos": True}))
            assert quick[-1].complete.completion_tokens == 500
            # The slow sequence ends although its client does not read.
            await until(lambda: not core.live)
            assert (await client.status()).active_requests == 0
            while (response := await call.read()) is not grpc.aio.EOF:
                chunks.append(response.chunk)
            tokens = [token for chunk in chunks for token in chunk.token_ids]
            assert tokens == [(6 + i) % MODEL.vocab_size for i in range(1500)]
            assert len(chunks) < 1500  # while it was blocked, tokens were merged into one chunk

    with FakeCore(config=config) as core:
        asyncio.run(main(core))
