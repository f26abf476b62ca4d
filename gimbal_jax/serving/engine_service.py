"""vllm.grpc.engine.VllmEngine over a Frontend: the protocol that the smg gateway speaks."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import hashlib
import json
import uuid
from collections.abc import Callable, Sequence
from typing import NoReturn

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

from gimbal_jax.serving.frontend import DuplicateRequest, Frontend, GenerationFailed, NotServing, QueueFull
from gimbal_jax.serving.model_files import ModelFiles
from gimbal_jax.serving.request import Output, TokenLogprobs
from gimbal_jax.serving.validation import (
    InvalidField,
    Parsed,
    Unsupported,
    max_prompt_tokens,
    parse_generate,
    parse_priority,
)
from gimbal_jax.version import __version__

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
CHUNK_BYTES = 64 * 1024
"""Archive bytes per message of GetTokenizer."""

STATUS_CODES: dict[type[Exception], grpc.StatusCode] = {
    InvalidField: grpc.StatusCode.INVALID_ARGUMENT,
    Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    DuplicateRequest: grpc.StatusCode.ALREADY_EXISTS,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NotServing: grpc.StatusCode.UNAVAILABLE,
    GenerationFailed: grpc.StatusCode.INTERNAL,
}

type Context = grpc.aio.ServicerContext


class EngineService(pb_grpc.VllmEngineServicer):
    """``new_seed`` gives a uint32 for each request without a seed; ``wall_clock`` is Unix time in seconds."""

    def __init__(
        self, frontend: Frontend, files: ModelFiles, new_seed: Callable[[], int], wall_clock: Callable[[], float]
    ) -> None:
        self._frontend = frontend
        self._core = frontend.core
        self._files = files
        self._new_seed = new_seed
        self._wall_clock = wall_clock
        self._start = frontend.clock()
        self._last_receive = 0.0

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        self._last_receive = self._wall_clock()
        try:
            priority = parse_priority(context.invocation_metadata() or (), self._core.config.queue.policy)
            await self._generate(request, await self._parse(request), priority, context)
        except tuple(STATUS_CODES) as error:
            await context.abort(STATUS_CODES[type(error)], str(error))

    async def _parse(self, request: pb.GenerateRequest) -> Parsed:
        tokenizer = self._files.tokenizer
        encode = tokenizer.encode if tokenizer else None
        parse = functools.partial(parse_generate, request, self._core.model, self._core.config, encode, self._new_seed)
        # Long texts take a while to tokenize; the other streams go on meanwhile.
        return await asyncio.to_thread(parse) if request.HasField("text") else parse()

    async def _generate(self, request: pb.GenerateRequest, parsed: Parsed, priority: int, context: Context) -> None:
        request_id = request.request_id or uuid.uuid4().hex
        top = parsed.sampling.logprobs
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        news = self._frontend.generate(request_id, parsed.prompt, parsed.sampling, parsed.engine, priority)
        # Leaving the block, by an end or by the client's cancellation, frees the request's pages.
        async with contextlib.aclosing(news):
            async for output in news:
                token_ids += output.token_ids
                logprobs += output.logprobs
                if request.stream and output.token_ids:
                    chunk = pb.GenerateStreamChunk(
                        token_ids=output.token_ids,
                        prompt_tokens=len(parsed.prompt),
                        completion_tokens=len(token_ids),
                        output_logprobs=_logprobs(output.token_ids, output.logprobs, top),
                    )
                    await context.write(pb.GenerateResponse(chunk=chunk))
        complete = _complete(output, len(parsed.prompt), token_ids, _logprobs(token_ids, logprobs, top))
        await context.write(pb.GenerateResponse(complete=complete))

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        self._frontend.abort(request.request_ids)
        return pb.AbortResponse()

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        state = self._core.state
        return pb.HealthCheckResponse(healthy=state == "serving", message=state)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        model, config, files = self._core.model, self._core.config.engine, self._files
        return pb.GetModelInfoResponse(
            model_path=str(files.folder),
            is_generation=True,
            max_context_length=config.max_model_len,
            vocab_size=model.vocab_size,
            served_model_name=files.name,
            tokenizer_path=str(files.folder) if files.tokenizer else "",
            model_type="qwen3_moe",
            architectures=["Qwen3MoeForCausalLM"],
            eos_token_ids=model.eos_token_ids,
            pad_token_id=model.pad_token_id,
            bos_token_id=model.bos_token_id,
            max_req_input_len=max_prompt_tokens(config),
            default_sampling_params_json=json.dumps(files.sampling_defaults) if files.sampling_defaults else "",
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        config = self._core.config
        return pb.GetServerInfoResponse(
            active_requests=self._frontend.active,
            is_paused=self._core.state != "serving",
            last_receive_timestamp=self._last_receive,
            uptime_seconds=self._frontend.clock() - self._start,
            server_type="gimbal-grpc",
            data_parallel_size=config.mesh.dp,
            kv_cache_dtype=self._core.model.dtype,
            block_size=config.engine.page_size,
            model_dtype=self._core.model.dtype,
            max_num_seqs=config.engine.max_rows * config.mesh.dp,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        config = self._core.config
        engines = range(config.mesh.dp)
        if request.HasField("dp_rank") and request.dp_rank not in engines:
            rule = f"dp_rank must be in [0, {len(engines) - 1}], got {request.dp_rank}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, rule)
        capacity = config.engine.num_pages * config.engine.page_size
        loads = [
            pb.SchedulerLoad(
                dp_rank=trace.engine,
                num_running_reqs=trace.running_requests,
                num_waiting_reqs=trace.waiting_requests,
                num_total_reqs=trace.running_requests + trace.waiting_requests,
                num_used_tokens=round(trace.kv_use * capacity),
                max_total_num_tokens=capacity,
                token_usage=trace.kv_use,
                utilization=trace.running_requests / config.engine.max_rows,
                max_running_requests=config.engine.max_rows,
                num_waiting_uncached_tokens=trace.waiting_prefill_tokens,
            )
            for trace in self._core.traces
            if not request.HasField("dp_rank") or trace.engine == request.dp_rank
        ]
        return pb.GetLoadsResponse(
            timestamp=datetime.datetime.fromtimestamp(self._wall_clock(), datetime.UTC).isoformat(),
            version=__version__,
            dp_rank_count=len(loads),
            loads=loads,
        )

    async def GetTokenizer(self, request: common_pb2.GetTokenizerRequest, context: Context) -> None:
        archive = self._files.archive
        if not archive:
            await context.abort(grpc.StatusCode.NOT_FOUND, "the model has no tokenizer")
        for start in range(0, len(archive), CHUNK_BYTES):
            is_last = start + CHUNK_BYTES >= len(archive)
            sha256 = hashlib.sha256(archive).hexdigest() if is_last else ""
            data = archive[start : start + CHUNK_BYTES]
            await context.write(common_pb2.GetTokenizerChunk(data=data, sha256=sha256))

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> NoReturn:
        await _unimplemented(context, "Embed: the model generates text, it makes no embeddings")

    async def FlushCache(self, request: common_pb2.FlushCacheRequest, context: Context) -> NoReturn:
        await _unimplemented(context, "FlushCache: there is no prefix cache to flush")

    async def StartProfile(self, request: common_pb2.StartProfileRequest, context: Context) -> NoReturn:
        await _unimplemented(context, "StartProfile: the server has no profiler")

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: Context) -> NoReturn:
        await _unimplemented(context, "StopProfile: the server has no profiler")

    async def SubscribeKvEvents(self, request: common_pb2.SubscribeKvEventsRequest, context: Context) -> NoReturn:
        await _unimplemented(context, "SubscribeKvEvents: there is no prefix cache that could send events")


async def _unimplemented(context: Context, text: str) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)
    raise AssertionError("abort raises")


def _complete(
    last: Output, prompt_tokens: int, token_ids: Sequence[int], logprobs: pb.OutputLogProbs | None
) -> pb.GenerateComplete:
    return pb.GenerateComplete(
        output_ids=token_ids,
        finish_reason=last.finish_reason,
        prompt_tokens=prompt_tokens,
        completion_tokens=len(token_ids),
        output_logprobs=logprobs,
        matched_token_id=last.stop_token_id,
    )


def _logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int | None) -> pb.OutputLogProbs | None:
    if top is None:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[entry.chosen for entry in logprobs],
        token_ids=token_ids,
        top_logprobs=[
            pb.TopLogProbs(values=entry.top_values[:top], token_ids=entry.top_ids[:top]) for entry in logprobs
        ]
        if top
        else (),
    )
