"""vllm.grpc.engine.VllmEngine over a Frontend: the protocol that the smg gateway speaks."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import hashlib
import json
import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

from gimbal_jax.exceptions import NotServing, Precondition, require
from gimbal_jax.serving.engine.request import TokenLogprobs
from gimbal_jax.serving.frontend.choices import Generation, Piece, run_choices
from gimbal_jax.serving.frontend.frontend import Frontend
from gimbal_jax.serving.rpc.calls import Context, answering, input_logprobs, output_logprobs
from gimbal_jax.serving.rpc.interceptors import origin_of
from gimbal_jax.serving.rpc.kv_events import KvEvents
from gimbal_jax.serving.rpc.model_files import ModelFiles
from gimbal_jax.serving.rpc.parsing import (
    Limits,
    is_slow,
    max_prompt_tokens,
    parse_generate,
    parse_priority,
)
from gimbal_jax.serving.text.grammar import Constraints
from gimbal_jax.version import __version__

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
CHUNK_BYTES = 64 * 1024
"""Archive bytes per message of GetTokenizer."""
FLUSH_S = 5.0
"""Time for an idle engine to say that its cache is empty."""


class Profiler(Protocol):
    """Records what host and devices do (``profiler.Profiler``). Either call may take seconds."""

    def start(self, request: common_pb2.StartProfileRequest) -> common_pb2.ProfileResponse: ...

    def stop(self) -> common_pb2.ProfileResponse: ...


@dataclass
class _Collected:
    """All news of one choice, for its last message."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0

    def add(self, piece: Piece) -> None:
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.prompt_logprobs = self.prompt_logprobs or piece.prompt_logprobs
        self.cached_tokens += piece.cached_tokens


class EngineService(pb_grpc.VllmEngineServicer):
    """``new_seed`` gives a uint32 for each request without a seed; ``wall_clock`` is Unix time in seconds."""

    def __init__(
        self,
        frontend: Frontend,
        files: ModelFiles,
        new_seed: Callable[[], int],
        wall_clock: Callable[[], float],
        constraints: Constraints | None = None,
        profiler: Profiler | None = None,
    ) -> None:
        self._frontend = frontend
        self._core = frontend.core
        self._files = files
        self._limits = Limits(self._core.model, self._core.config, files.tokenizer, constraints, new_seed)
        self._wall_clock = wall_clock
        self._profiler = profiler
        self._start = frontend.clock()
        self._last_receive = 0.0
        self._kv_events = KvEvents(frontend.prefixes, frontend.page_log, self._core.config, frontend.clock, wall_clock)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        self._last_receive = self._wall_clock()
        async with answering(context):
            priority = parse_priority(context.invocation_metadata() or (), self._core.config.queue.policy)
            parse = functools.partial(parse_generate, request, self._limits)
            # The other streams go on meanwhile.
            generation = await asyncio.to_thread(parse) if is_slow(request) else parse()
            await self._generate(request, generation, priority, context)

    async def _generate(
        self, request: pb.GenerateRequest, generation: Generation, priority: int, context: Context
    ) -> None:
        new_decoder = None
        if generation.stops:  # nothing else here needs the text
            assert self._files.tokenizer is not None
            new_decoder = functools.partial(self._files.tokenizer.decoder, generation.skip_special_tokens)
        request_id = request.request_id or uuid.uuid4().hex
        collected = [_Collected() for _ in range(generation.n)]
        pieces = run_choices(
            self._frontend, request_id, generation, new_decoder, priority=priority, origin=origin_of(context)
        )
        # Leaving the block, by an end or by the client's cancellation, frees the request's pages.
        async with contextlib.aclosing(pieces):
            async for index, piece in pieces:
                is_first = not collected[index].token_ids
                collected[index].add(piece)
                if request.stream and piece.token_ids:
                    chunk = _chunk(index, piece, collected[index], generation, is_first)
                    await context.write(pb.GenerateResponse(chunk=chunk))
                if piece.finish_reason is not None:
                    complete = _complete(index, piece, collected[index], generation)
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
        if request.HasField("dp_rank"):
            async with answering(context):
                last = config.mesh.dp - 1
                require(0 <= request.dp_rank <= last, "dp_rank", f"be in [0, {last}]", request.dp_rank)
        capacity = config.engine.num_pages * config.engine.page_size
        rate_S = self._frontend.token_rate.per_second(self._frontend.clock())
        count = self._frontend.counters
        loads = [
            pb.SchedulerLoad(
                dp_rank=trace.engine,
                num_running_reqs=trace.running_requests,
                num_waiting_reqs=trace.waiting_requests,
                num_total_reqs=trace.running_requests + trace.waiting_requests,
                num_used_tokens=round(trace.kv_use * capacity),
                max_total_num_tokens=capacity,
                token_usage=trace.kv_use,
                gen_throughput=rate_S[trace.engine],
                cache_hit_rate=count.cached_tokens_S[trace.engine] / max(1, count.started_tokens_S[trace.engine]),
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
            rule = "the model has no tokenizer: put its tokenizer.json into the model folder, or send token ids"
            await context.abort(grpc.StatusCode.NOT_FOUND, rule)
        for start in range(0, len(archive), CHUNK_BYTES):
            is_last = start + CHUNK_BYTES >= len(archive)
            sha256 = hashlib.sha256(archive).hexdigest() if is_last else ""
            data = archive[start : start + CHUNK_BYTES]
            await context.write(common_pb2.GetTokenizerChunk(data=data, sha256=sha256))

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> NoReturn:
        await _unimplemented(context, "Embed: the model generates text, it makes no embeddings")

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        async with answering(context):
            good = math.isfinite(request.timeout_s) and request.timeout_s >= 0
            require(good, "timeout_s", "be finite and at least 0", request.timeout_s)
            success, message = await self._flush(request.timeout_s)
            return common_pb2.FlushCacheResponse(success=success, message=message)

    async def _flush(self, timeout_s: float) -> tuple[bool, str]:
        if not self._core.config.engine.prefix_cache:
            return True, "there is no prefix cache: nothing is kept between requests"
        frontend = self._frontend
        try:
            async with asyncio.timeout(timeout_s):
                await frontend.idle.wait()
        except TimeoutError:
            return False, f"{frontend.active} requests are running: nothing was flushed"
        self._core.flush_cache()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                while frontend.prefixes.pages and not frontend.page_log.closed:
                    await frontend.page_log.changed()
        left = frontend.prefixes.pages
        return not left, f"{left} pages are in the prefix cache" + (": requests have come meanwhile" if left else "")

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        async with answering(context):
            return await asyncio.to_thread(self._need_profiler().start, request)

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: Context) -> common_pb2.ProfileResponse:
        async with answering(context):
            return await asyncio.to_thread(self._need_profiler().stop)

    def _need_profiler(self) -> Profiler:
        if self._profiler is None:
            raise Precondition("the server keeps no profiles: start it with --profile-dir")
        return self._profiler

    async def SubscribeKvEvents(self, request: common_pb2.SubscribeKvEventsRequest, context: Context) -> None:
        if not self._core.config.engine.prefix_cache:
            await _unimplemented(context, "SubscribeKvEvents: there is no prefix cache that could send events")
        async with answering(context):
            at = self._kv_events.place_of(request.start_sequence_number)
            await context.send_initial_metadata(())
            async for batch in self._kv_events.batches(at):
                await context.write(batch)
            raise NotServing("the server has stopped")


async def _unimplemented(context: Context, text: str) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)
    raise AssertionError("abort raises")


def _chunk(
    index: int, piece: Piece, collected: _Collected, generation: Generation, is_first: bool
) -> pb.GenerateStreamChunk:
    sampling, prompt = generation.sampling, generation.prompt
    return pb.GenerateStreamChunk(
        index=index,
        token_ids=piece.token_ids,
        prompt_tokens=len(prompt),
        completion_tokens=len(collected.token_ids),
        cached_tokens=collected.cached_tokens,
        output_logprobs=output_logprobs(piece.token_ids, piece.logprobs, sampling.logprobs),
        input_logprobs=input_logprobs(prompt, piece.prompt_logprobs, sampling.prompt_logprobs) if is_first else None,
    )


def _complete(index: int, last: Piece, collected: _Collected, generation: Generation) -> pb.GenerateComplete:
    sampling, prompt = generation.sampling, generation.prompt
    return pb.GenerateComplete(
        index=index,
        output_ids=collected.token_ids,
        finish_reason=last.finish_reason,
        prompt_tokens=len(prompt),
        completion_tokens=len(collected.token_ids),
        cached_tokens=collected.cached_tokens,
        output_logprobs=output_logprobs(collected.token_ids, collected.logprobs, sampling.logprobs),
        input_logprobs=input_logprobs(prompt, collected.prompt_logprobs, sampling.prompt_logprobs),
        matched_token_id=last.stop if isinstance(last.stop, int) else None,
        matched_stop_str=last.stop if isinstance(last.stop, str) else None,
    )
