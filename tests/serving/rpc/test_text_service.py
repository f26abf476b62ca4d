"""gimbal.v1.Text through a real socket: text and chats in, text out."""

import asyncio
import contextlib
import functools
import json

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2

from gimbal_jax.protos import text_pb2 as pb
from gimbal_jax.serving.rpc.model_files import load_model_files
from gimbal_jax.serving.rpc.parsing import Limits
from gimbal_jax.serving.rpc.text_service import parse_text
from gimbal_jax.serving.rpc.validation import InvalidField, Unsupported
from gimbal_jax.serving.text.tokenizer import Tokenizer
from tests.serving.engine.page_news import pages_of, stored
from tests.serving.fake_server import (
    BY_PRIORITY,
    CONFIG,
    MODEL,
    NO_FILES,
    FakeCore,
    running_server,
    until,
    write_model_folder,
)

Code = grpc.StatusCode
HI = [pb.Message(role="user", content="hi")]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return load_model_files(write_model_folder(tmp_path_factory.mktemp("model")))


@contextlib.asynccontextmanager
async def text_server(files, **core_options):
    with FakeCore(**core_options) as core:
        async with asyncio.timeout(20), running_server(core, files) as (client, *_):
            yield core, client


def with_text(**core_options):
    """Runs an async test(files, core, client) against a server of its own."""

    def decorate(test):
        @functools.wraps(test)
        def run(files):
            async def main():
                async with text_server(files, **core_options) as (core, client):
                    await test(files, core, client)

            asyncio.run(main())

        del run.__wrapped__
        return run

    return decorate


def request(text="a", *, chat=None, params=None, **fields):
    params = vllm_engine_pb2.SamplingParams(**{"max_tokens": 7, **(params or {})})
    prompt = {"text": text} if chat is None else {"chat": pb.Chat(**chat)}
    return pb.TextRequest(sampling_params=params, **prompt, **fields)


async def responses(client, message, **options):
    return [response async for response in client.text.Generate(message, **options)]


async def refused(call, code, text):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    assert (error.value.code(), text in error.value.details()) == (code, True), error.value


@with_text()
async def test_text_in_and_out(files, core, client):
    answer = await responses(client, request())
    assert "".join(response.text for response in answer) == "bcdefgh"
    assert files.tokenizer.decode([token for response in answer for token in response.token_ids]) == "bcdefgh"
    *others, last = answer
    assert (last.finish_reason, last.usage.prompt_tokens, last.usage.completion_tokens) == ("length", 1, 7)
    assert not any(response.finish_reason or response.HasField("usage") for response in others)
    assert last.WhichOneof("matched_stop") is None


@with_text()
async def test_usage_says_what_was_cached(files, core, client):
    for engine in range(2):
        core.tell(stored(engine, *pages_of(files.tokenizer.encode("0123456789"))))
    for params in ({}, {"n": 2}):
        usages = [
            one.usage for one in await responses(client, request("0123456789", params=params)) if one.finish_reason
        ]
        assert [usage.cached_tokens for usage in usages] == [8] * len(usages)
    assert len(usages) == 2


@with_text()
async def test_choices_stops_and_logprobs(files, core, client):
    params = {"n": 2, "stop": ["ef"], "logprobs": 1, "prompt_logprobs": 0}
    answer = await responses(client, request("za", params=params))
    for index in (0, 1):
        own = [response for response in answer if response.index == index]
        assert "".join(response.text for response in own) == "bcd"
        assert (own[-1].finish_reason, own[-1].matched_stop_str) == ("stop", "ef")
        assert (own[-1].usage.prompt_tokens, own[-1].usage.completion_tokens) == (2, 5)
        assert all(len(response.output_logprobs.token_logprobs) == len(response.token_ids) for response in own)
        assert [len(response.input_logprobs.token_logprobs) for response in own] == [2] + [0] * (len(own) - 1)
    [stop_id] = files.tokenizer.encode("d")
    *_, last = await responses(client, request(params={"stop_token_ids": [stop_id]}))
    assert (last.finish_reason, last.matched_token_id) == ("stop", stop_id)


@with_text()
async def test_characters_come_whole(files, core, client):
    """The fake core counts through the bytes, most of which are pieces of characters."""
    answer = await responses(client, request("\x01", params={"max_tokens": 60}))
    tokens = [token for response in answer for token in response.token_ids]
    assert "".join(response.text for response in answer) == files.tokenizer.decode(tokens).rstrip("\ufffd")


@with_text()
async def test_chats_go_through_the_template(files, core, client):
    await responses(client, request(chat={"messages": HI}))
    prompt = "<|start|>user: hi<|end|>\n<|start|>assistant:"
    assert core.submitted[-1].prompt == tuple(files.tokenizer.encode(prompt))
    chat = {"messages": HI, "template_variables_json": '{"add_generation_prompt": false}'}
    await responses(client, request(chat=chat))
    assert core.submitted[-1].prompt == tuple(files.tokenizer.encode("<|start|>user: hi<|end|>\n"))


def test_tools_variables_and_fields_reach_the_template(tmp_path):
    template = "{{ messages | tojson }}{{ tools | tojson }}{{ thinking }}"
    files = load_model_files(write_model_folder(tmp_path, chat_template=template))
    assert files.tokenizer is not None
    encode = files.tokenizer.encode
    message = pb.Message(role="tool", content="21 C", fields_json='{"tool_call_id": "7", "role": "x"}')
    chat = pb.Chat(messages=[message], tools_json='[{"name": "f"}]', template_variables_json='{"thinking": "no"}')

    async def main():
        async with text_server(files) as (_, client):
            for given, rendered in (
                (chat, '[{"tool_call_id": "7", "role": "tool", "content": "21 C"}][{"name": "f"}]no'),
                (pb.Chat(messages=HI, tools_json="[]"), '[{"role": "user", "content": "hi"}]null'),
            ):
                counted = await client.text.CountTokens(pb.CountTokensRequest(chat=given))
                assert counted.tokens == len(encode(rendered))
            half = pb.Chat(messages=HI, template_variables_json='{"thinking": "\\ud800"}')
            call = client.text.CountTokens(pb.CountTokensRequest(chat=half))
            await refused(call, Code.INVALID_ARGUMENT, "chat must be one that the model's template takes")

    asyncio.run(main())


@with_text()
async def test_count_tokens(files, core, client):
    assert (await client.text.CountTokens(pb.CountTokensRequest(text="héllo"))).tokens == 6
    assert (await client.text.CountTokens(pb.CountTokensRequest())).tokens == 0
    assert (await client.text.CountTokens(pb.CountTokensRequest(text="a" * 5000))).tokens == 5000


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (request(""), "text must hold at least one token"),
        (pb.TextRequest(), "text must hold at least one token"),
        (request("a" * 64), "text must hold at most 63 tokens, got 64"),
        (request(chat={"messages": HI * 9}), "chat must hold at most 63 tokens"),
        (request(chat={}), "chat.messages must hold at least one message"),
        (request(chat={"messages": HI, "tools_json": "{}"}), "chat.tools_json must be a JSON array"),
        (request(chat={"messages": HI, "tools_json": "[" * 5000}), "chat.tools_json must be a JSON array"),
        (
            request(chat={"messages": HI, "template_variables_json": "[1]"}),
            "chat.template_variables_json must be a JSON object",
        ),
        (
            request(chat={"messages": HI, "template_variables_json": '{"messages": []}'}),
            "chat.template_variables_json must leave messages to the field of that name",
        ),
        (
            request(chat={"messages": [pb.Message(role="user", fields_json="x")]}),
            "chat.messages[0].fields_json must be a JSON object",
        ),
        (request(priority=1), "priority must be 0 where the queue policy is not priority"),
        (request(data_parallel_rank=2), "data_parallel_rank must be in [0, 1], got 2"),
        (request(params={"top_p": 2}), "sampling_params.top_p must be in (0, 1]"),
    ],
)
def test_bad_requests_name_field_and_rule(files, message, text):
    async def main():
        async with text_server(files) as (_, client):
            await refused(responses(client, message), Code.INVALID_ARGUMENT, text)

    asyncio.run(main())


def test_without_tokenizer_or_template_it_says_what_to_do(tmp_path):
    async def main(files, message, text):
        async with text_server(files) as (_, client):
            await refused(responses(client, message), Code.FAILED_PRECONDITION, text)

    asyncio.run(main(NO_FILES, request(), "put its tokenizer.json into the model folder"))
    (write_model_folder(tmp_path) / "tokenizer_config.json").unlink()
    asyncio.run(main(load_model_files(tmp_path), request(chat={"messages": HI}), "put chat_template.jinja"))


def test_priority_is_heeded(files):
    async def main():
        async with text_server(files, config=BY_PRIORITY) as (core, client):
            await responses(client, request(priority=-5))
            assert core.submitted[0].priority == -5
            await refused(
                responses(client, request(priority=101)), Code.INVALID_ARGUMENT, "priority must be an integer"
            )

    asyncio.run(main())


@with_text(paused=True)
async def test_ids_abort_and_cancellation(files, core, client):
    stream = asyncio.create_task(responses(client, request(request_id="a", params={"n": 2})))
    await until(lambda: len(core.live) == 2)
    await refused(responses(client, request(request_id="a")), Code.ALREADY_EXISTS, "'a'")
    await client.abort("a")
    assert [response.finish_reason for response in await stream] == ["abort"] * 2
    call = client.text.Generate(request())
    reading = asyncio.create_task(call.read())
    await until(lambda: core.live)
    call.cancel()
    await until(lambda: not core.live)
    await asyncio.gather(reading, return_exceptions=True)
    await refused(responses(client, request(), timeout=0.2), Code.DEADLINE_EXCEEDED, "")
    await until(lambda: not core.live)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
).map(json.dumps)


@settings(deadline=None)
@given(
    role=st.text(max_size=5),
    content=st.text(max_size=20),
    fields=JSON | st.text(max_size=5),
    tools=JSON,
    variables=JSON | st.just('{"self": 1, "add_generation_prompt": {}, "bos_token": "\\ud800"}'),
)
def test_any_chat_is_refused_clearly_or_taken(files, role, content, fields, tools, variables):
    message = pb.Message(role=role, content=content, fields_json=fields)
    chat = pb.Chat(messages=[message], tools_json=tools, template_variables_json=variables)
    template = "{{ bos_token }}{% for m in messages %}{{ m.role + m.content + m.name }}{% endfor %}{{ tools[0].x.y }}"
    tokenizer = Tokenizer({"tokenizer.json": files.tokenizer.json, "chat_template.jinja": template})
    limits = Limits(MODEL, CONFIG, tokenizer, None, lambda: 1)
    with contextlib.suppress(InvalidField, Unsupported):
        parse_text(pb.TextRequest(chat=chat), tokenizer, limits)
