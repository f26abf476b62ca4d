"""gimbal.v1.Text over a Frontend: prompts and chats as text in, text out."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import uuid
from collections.abc import Callable
from typing import Any

from smg_grpc_proto import vllm_engine_pb2

from gimbal_jax.protos import text_pb2 as pb
from gimbal_jax.protos import text_pb2_grpc as pb_grpc
from gimbal_jax.serving.frontend.choices import Piece, run_choices
from gimbal_jax.serving.frontend.frontend import Frontend
from gimbal_jax.serving.rpc.calls import Context, answering, input_logprobs, output_logprobs
from gimbal_jax.serving.rpc.interceptors import origin_of
from gimbal_jax.serving.rpc.model_files import ModelFiles
from gimbal_jax.serving.rpc.parsing import Constraints, Generation, Limits, check_length, parse_prompt
from gimbal_jax.serving.rpc.validation import InvalidField, Precondition, check_priority, require
from gimbal_jax.serving.text.tokenizer import Tokenizer

SERVICE = pb.DESCRIPTOR.services_by_name["Text"].full_name


class TextService(pb_grpc.TextServicer):
    """``new_seed`` gives a uint32 for each request without a seed."""

    def __init__(
        self,
        frontend: Frontend,
        files: ModelFiles,
        new_seed: Callable[[], int],
        constraints: Constraints | None = None,
    ) -> None:
        core = frontend.core
        self._frontend = frontend
        self._tokenizer = files.tokenizer
        self._limits = Limits(core.model, core.config, files.tokenizer, constraints, new_seed)

    async def Generate(self, request: pb.TextRequest, context: Context) -> None:
        async with answering(context):
            tokenizer = _need_tokenizer(self._tokenizer)
            queue = self._limits.config.queue.policy
            priority = check_priority(request.priority, "priority", queue, request.priority)
            # Templates, tokenizing and constraints take a while; the other streams go on meanwhile.
            generation = await asyncio.to_thread(parse_text, request, tokenizer, self._limits)
            await self._generate(request, tokenizer, generation, priority, context)

    async def _generate(
        self, request: pb.TextRequest, tokenizer: Tokenizer, generation: Generation, priority: int, context: Context
    ) -> None:
        request_id = request.request_id or uuid.uuid4().hex
        new_decoder = functools.partial(tokenizer.decoder, generation.skip_special_tokens)
        usages = [pb.Usage(prompt_tokens=len(generation.prompt)) for _ in range(generation.n)]
        pieces = run_choices(
            self._frontend, request_id, generation, new_decoder, priority=priority, origin=origin_of(context)
        )
        # Leaving the block, by an end or by the client's cancellation, frees the request's pages.
        async with contextlib.aclosing(pieces):
            async for index, piece in pieces:
                usage = usages[index]
                is_first = not usage.completion_tokens
                usage.completion_tokens += len(piece.token_ids)
                usage.cached_tokens += piece.cached_tokens
                await context.write(_response(index, piece, generation, usage, is_first))

    async def CountTokens(self, request: pb.CountTokensRequest, context: Context) -> pb.CountTokensResponse:
        async with answering(context):
            tokenizer = _need_tokenizer(self._tokenizer)
            tokens = await asyncio.to_thread(lambda: len(tokenizer.encode(_text_of(request, tokenizer))))
            return pb.CountTokensResponse(tokens=tokens)


def parse_text(request: pb.TextRequest, tokenizer: Tokenizer, limits: Limits) -> Generation:
    """Check every field. Slow. Raises InvalidField, Unsupported or Precondition."""
    field = request.WhichOneof("prompt") or "text"
    text = _text_of(request, tokenizer)
    check_length(field, text, request.sampling_params, tokenizer, limits)
    return parse_prompt(request, field, tokenizer.encode(text), limits)


def _need_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        rule = "the model has no tokenizer: put its tokenizer.json into the model folder, or send token ids to"
        raise Precondition(f"{rule} {vllm_engine_pb2.DESCRIPTOR.services_by_name['VllmEngine'].full_name}")
    return tokenizer


def _text_of(request: pb.TextRequest | pb.CountTokensRequest, tokenizer: Tokenizer) -> str:
    return _render(request.chat, tokenizer) if request.WhichOneof("prompt") == "chat" else request.text


def _render(chat: pb.Chat, tokenizer: Tokenizer) -> str:
    """The prompt text of a chat."""
    if not tokenizer.has_chat_template:
        rule = "the model has no chat template: put chat_template.jinja into its folder, or send the prompt as text"
        raise Precondition(rule)
    require(len(chat.messages) > 0, "chat.messages", "hold at least one message")
    messages = [
        {
            **_from_json(f"chat.messages[{number}].fields_json", message.fields_json, dict),
            "role": message.role,
            "content": message.content,
        }
        for number, message in enumerate(chat.messages)
    ]
    variables = _from_json("chat.template_variables_json", chat.template_variables_json, dict)
    for name in ("messages", "tools"):
        require(name not in variables, "chat.template_variables_json", f"leave {name} to the field of that name")
    tools = _from_json("chat.tools_json", chat.tools_json, list)
    try:
        # Templates ask whether there are tools; an empty list would be some.
        text = tokenizer.render_chat(messages, **variables, tools=tools or None)
        text.encode()  # JSON can hold halves of characters, which no tokenizer takes
    except ValueError as error:
        raise InvalidField(f"chat must be one that the model's template takes; {error}") from error
    return text


def _from_json[T: (dict[str, Any], list[Any])](field: str, text: str, kind: type[T]) -> T:
    rule = f"be a JSON {'object' if kind is dict else 'array'}"
    try:
        value = json.loads(text) if text else kind()
    except (ValueError, RecursionError) as error:
        raise InvalidField(f"{field} must {rule}: {error}") from error
    require(isinstance(value, kind), field, rule)
    return value


def _response(index: int, piece: Piece, generation: Generation, usage: pb.Usage, is_first: bool) -> pb.TextResponse:
    sampling, prompt = generation.sampling, generation.prompt
    return pb.TextResponse(
        index=index,
        text=piece.text,
        token_ids=piece.token_ids,
        finish_reason=piece.finish_reason,
        matched_token_id=piece.stop if isinstance(piece.stop, int) else None,
        matched_stop_str=piece.stop if isinstance(piece.stop, str) else None,
        usage=usage if piece.finish_reason is not None else None,
        output_logprobs=output_logprobs(piece.token_ids, piece.logprobs, sampling.logprobs),
        input_logprobs=input_logprobs(prompt, piece.prompt_logprobs, sampling.prompt_logprobs) if is_first else None,
    )
