"""The client over the stubs: text, chat, chunks, typed errors. Its control calls: test_control_service.py."""

import asyncio
import dataclasses

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb

from gimbal_jax.client import records
from gimbal_jax.client.client import GimbalClient
from gimbal_jax.client.options import SamplingOptions
from gimbal_jax.config import NetworkConfig
from gimbal_jax.protos import control_pb2
from gimbal_jax.serving.engine.queue import QueueHead
from gimbal_jax.serving.rpc.model_files import load_model_files
from tests.serving.fake_server import (
    BY_PRIORITY,
    MODEL,
    FakeCore,
    running_server,
    until,
    with_server,
    write_model_folder,
)
from tests.serving.statuses import per_engine


async def collect(chunks):
    return [chunk async for chunk in chunks]


def with_text_server(folder, test, chat_template=None, **core_options):
    files = load_model_files(write_model_folder(folder, chat_template=chat_template))

    async def main(core):
        async with asyncio.timeout(120), running_server(core, files) as (c, *_):
            await test(core, c)

    with FakeCore(**core_options) as core:
        asyncio.run(main(core))


@with_server()
async def test_a_stream_yields_chunks_as_tokens_come(core, client):
    *chunks, last = await collect(client.generate(token_ids=[5], max_tokens=3, logprobs=2))
    assert [token for chunk in chunks for token in chunk.token_ids] == [6, 7, 8]
    assert all(chunk.finish_reason is None and len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
    assert chunks[0].logprobs[0].top_ids == (0, 1)
    assert (last.token_ids, last.finish_reason, last.completion_tokens, last.prompt_tokens) == ((), "length", 3, 1)


@with_server()
async def test_without_streaming_each_output_is_one_chunk(core, client):
    [chunk] = await collect(client.generate(token_ids=[5], stop_token_ids=[8], logprobs=0, stream=False))
    assert (chunk.token_ids, chunk.finish_reason, chunk.stop_token_id) == ((6, 7), "stop", 8)
    assert [(entry.chosen, entry.top_ids) for entry in chunk.logprobs] == [(-0.5, ())] * 2


@with_server({"config": BY_PRIORITY})
async def test_priority_reaches_the_core_or_is_rejected(core, client):
    for priority in (0, -100, 7):
        await collect(client.generate(token_ids=[5], max_tokens=1, priority=priority))
    assert [request.priority for request in core.submitted] == [0, -100, 7]
    with pytest.raises(records.InvalidRequest, match=r"x-gimbal-priority must be an integer in \[-100, 100\], got 101"):
        await collect(client.generate(token_ids=[5], priority=101))


@with_server()
async def test_all_options_reach_the_core(core, client):
    options = {
        "max_tokens": 4,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.25,
        "min_p": 0.125,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "seed": 9,
        "logprobs": 1,
        "prompt_logprobs": 2,
    }
    chunks = client.generate(
        token_ids=[7, 5],
        truncate_prompt_tokens=1,
        logit_bias={3: 0.5},
        stop_token_ids=[100],
        ignore_eos=True,
        request_id="mine",
        engine=1,
        timeout_s=5,
        **options,
    )
    await collect(chunks)
    [request] = core.submitted
    assert (request.engine, request.prompt, request.sampling.stop_token_ids) == (1, (5,), (100,))
    assert request.label == "mine"
    assert {name: getattr(request.sampling, name) for name in options} == options
    assert request.sampling.logit_bias == ((3, 0.5),)


def test_text_prompts_yield_text(tmp_path):
    async def test(core, client):
        chunks = await collect(client.generate("\x01", max_tokens=4))
        prompt = core.submitted[0].prompt
        tokenizer = await client.tokenizer()
        assert prompt == tuple(tokenizer.encode("\x01"))
        expected = tokenizer.decode(range(prompt[0] + 1, prompt[0] + 5))
        assert "".join(chunk.text for chunk in chunks) == expected
        [chunk] = await collect(client.generate("\x01", max_tokens=4, stream=False))
        assert chunk.text == expected

    with_text_server(tmp_path, test)


def test_stop_strings_end_the_text(tmp_path):
    async def test(core, client):
        for options, text in (
            ({}, "bc"),
            ({"include_stop_str_in_output": True}, "bcde"),
            ({"min_tokens": 4}, "bcdefg"),
        ):
            for stream in (True, False):
                chunks = await collect(client.generate("a", stop=["de", "g!"], max_tokens=6, stream=stream, **options))
                assert "".join(chunk.text for chunk in chunks) == text
                assert chunks[-1].stop_text == (None if text == "bcdefg" else "de")

    with_text_server(tmp_path, test)


@with_server()
async def test_each_choice_has_its_own_chunks_and_prompt_logprobs(core, client):
    chunks = await collect(client.generate(token_ids=[4, 5], n=2, max_tokens=3, prompt_logprobs=1))
    for index in (0, 1):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert [token for chunk in own for token in chunk.token_ids] == [6, 7, 8]
        assert own[-1].finish_reason == "length"
        [logprobs] = own[0].prompt_logprobs
        assert (logprobs.chosen, logprobs.top_ids) == (-1.0, (0,))
        assert not any(chunk.prompt_logprobs for chunk in own[1:])


def test_constraints_reach_the_server(tmp_path):
    async def test(core, client):
        for options in ({"json_schema": "{}"}, {"regex": "a+"}, {"choice": ["a", "b"]}):
            chunks = client.generate("a", max_tokens=1, **options)
            await anext(chunks)
            await chunks.aclose()
            assert core.submitted[-1].grammar is not None

    # The end token must be one that the tokenizer has.
    with_text_server(tmp_path, test, model=dataclasses.replace(MODEL, eos_token_ids=(257,)))


def test_the_api_key_is_sent_with_every_call(tmp_path):
    key = "a-key-of-16-chars-or-more"
    (tmp_path / "keys").write_text(f"{key} me\n")
    network = NetworkConfig(port=0, api_keys=tmp_path / "keys")

    async def main(core):
        async with asyncio.timeout(120), running_server(core, network=network) as (client, port, *_):
            async with GimbalClient(f"127.0.0.1:{port}", api_key=key) as friend:
                assert (await collect(friend.generate(token_ids=[1], max_tokens=1)))[-1].finish_reason == "length"
                assert (await friend.status()).state == "serving"
            with pytest.raises(records.Unauthenticated):
                await client.status()
            async with GimbalClient(f"127.0.0.1:{port}", api_key="wrong") as stranger:
                with pytest.raises(records.Unauthenticated):
                    await collect(stranger.generate(token_ids=[1]))

    with FakeCore() as core:
        asyncio.run(main(core))


def test_half_a_certificate_is_rejected(tmp_path):
    async def main():
        with pytest.raises(ValueError, match="tls_cert and tls_key go together"):
            GimbalClient("127.0.0.1:1", tls_cert=tmp_path / "cert.pem")

    asyncio.run(main())


def test_chat_renders_the_template(tmp_path):
    async def test(core, client):
        chunks = await collect(client.chat([{"role": "user", "content": "hi"}], max_tokens=2))
        text = "<|start|>user: hi<|end|>\n<|start|>assistant:"
        tokenizer = await client.tokenizer()
        assert core.submitted[0].prompt == tuple(tokenizer.encode(text))
        assert chunks[-1].finish_reason == "length"

    with_text_server(tmp_path, test)


def test_chat_passes_tools_and_variables_to_the_template(tmp_path):
    async def test(core, client):
        tokenizer, hi = await client.tokenizer(), [{"role": "user", "content": "hi"}]
        for options, rendered in (
            ({"tools": [{"name": "f"}], "template_variables": {"thinking": "no"}}, '1[{"name": "f"}]no'),
            ({"tools": []}, "1null"),
        ):
            await collect(client.chat(hi, max_tokens=1, **options))
            assert core.submitted[-1].prompt == tuple(tokenizer.encode(rendered))
        with pytest.raises(ValueError, match="messages must hold at least one message"):
            await collect(client.chat([]))

    with_text_server(tmp_path, test, chat_template="{{ messages | length }}{{ tools | tojson }}{{ thinking }}")


@with_server({"paused": True})
async def test_closing_the_iteration_cancels_the_request(core, client):
    chunks = client.generate(token_ids=[1], max_tokens=10)
    first = asyncio.create_task(anext(chunks))
    await until(lambda: core.live)
    core.step()
    assert (await first).token_ids == (2,)
    await chunks.aclose()
    await until(lambda: not core.live)


@with_server({"paused": True})
async def test_abort_ends_a_stream_with_finish_reason_abort(core, client):
    stream = asyncio.create_task(collect(client.generate(token_ids=[1], request_id="a")))
    await until(lambda: core.live)
    await client.abort("a")
    assert (await stream)[-1].finish_reason == "abort"


@with_server({"paused": True, "max_queue": 1})
async def test_errors_are_typed(core, client):
    stream = asyncio.create_task(collect(client.generate(token_ids=[1], request_id="a")))
    await until(lambda: core.live)
    rejected: list[tuple[dict, type[Exception], str]] = [
        ({"token_ids": [1], "top_p": 2.0}, records.InvalidRequest, r"sampling_params.top_p must be in \(0, 1\]"),
        ({"token_ids": [1], "request_id": "a"}, records.AlreadyRunning, "'a'"),
        ({"token_ids": [1]}, records.Overloaded, "waiting"),
    ]
    for options, error, text in rejected:
        with pytest.raises(error, match=text):
            await collect(client.generate(**options))
    with pytest.raises(records.ClientError, match="no tokenizer") as missing:
        await collect(client.generate("text"))
    assert missing.value.code == grpc.StatusCode.NOT_FOUND
    for options in ({}, {"prompt": "a", "token_ids": [1]}):
        with pytest.raises(ValueError, match="either prompt or token_ids"):
            await collect(client.generate(**options))
    with pytest.raises(ValueError, match="unknown sampling options: max_token"):
        await collect(client.generate(token_ids=[1], max_token=1))
    core.cancel(core.live[0])
    with pytest.raises(records.DeadlineExceeded):
        await collect(client.generate(token_ids=[1], timeout_s=0.1))
    stream.cancel()


def test_sampling_options_are_fields_of_the_protocol():
    assert set(SamplingOptions.__annotations__) <= set(pb.SamplingParams.DESCRIPTOR.fields_by_name)


def test_record_of_keeps_presence_tuples_and_nested_messages():
    engines = [control_pb2.EngineStatus(tokens_computed=1), control_pb2.EngineStatus(queue_head={"waited_s": 2.0})]
    message = control_pb2.GetStatusResponse(state="serving", engines=engines)
    status = records.record_of(records.ServerStatus, message)
    assert (status.state, per_engine(status, "tokens_computed")) == ("serving", (1, 0))
    assert per_engine(status, "queue_head") == (None, QueueHead("", 2.0, 0))
    assert (status.steps.count, status.steps.seconds.bounds, status.placement.last_rebalance) == (0, (), None)
