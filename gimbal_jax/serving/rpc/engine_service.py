"""The gRPC service vllm.grpc.engine.VllmEngine: the protocol of the smg gateway."""

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
from gimbal_jax.serving.core.core import EngineCore
from gimbal_jax.serving.engine.request import TokenDelta, TokenLogprobs
from gimbal_jax.serving.frontend.choices import Generation, run_choices
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
"""Most archive bytes in one message of GetTokenizer."""
FLUSH_S = 5.0
"""Seconds that idle engines have to empty their prefix caches."""


class Profiler(Protocol):
    """Recorder of host and device activity (``profiler.Profiler``). Either call may take seconds."""

    def start(self, request: common_pb2.StartProfileRequest) -> common_pb2.ProfileResponse: ...

    def stop(self) -> common_pb2.ProfileResponse: ...


@dataclass
class _Output:
    """Everything that one choice has brought so far, for its last message."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0

    def add(self, delta: TokenDelta) -> None:
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.cached_tokens += delta.cached_tokens


class EngineService(pb_grpc.VllmEngineServicer):
    """Serves requests through the frontend, and facts about the model, the engines and their caches.

    ``new_seed`` returns a uint32 for each request without a seed. ``wall_clock`` is Unix time in seconds. Without
    ``constraints`` or ``profiler``, requests that need them are rejected.
    """

    def __init__(
        self,
        core: EngineCore,
        frontend: Frontend,
        files: ModelFiles,
        new_seed: Callable[[], int],
        wall_clock: Callable[[], float],
        constraints: Constraints | None = None,
        profiler: Profiler | None = None,
    ) -> None:
        self._core = core
        self._frontend = frontend
        self._files = files
        self._limits = Limits(core.model, core.config, files.tokenizer, constraints, new_seed)
        self._wall_clock = wall_clock
        self._profiler = profiler
        self._start = frontend.clock()
        self._last_receive = 0.0
        self._kv_events = KvEvents(frontend.prefixes, frontend.page_log, core.config, frontend.clock, wall_clock)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        self._last_receive = self._wall_clock()
        async with answering(context):
            priority = parse_priority(context.invocation_metadata() or (), self._core.config.queue.policy)
            parse = functools.partial(parse_generate, request, self._limits)
            # A thread keeps slow parsing from delaying the other streams.
            generation = await asyncio.to_thread(parse) if is_slow(request) else parse()
            await self._generate(request, generation, priority, context)

    async def _generate(
        self, request: pb.GenerateRequest, generation: Generation, priority: int, context: Context
    ) -> None:
        """Write the chunks of a request, and the last message of each choice."""
        new_decoder = None
        if generation.stops:  # only stop strings need the text, clients decode for themselves
            assert self._files.tokenizer is not None
            new_decoder = functools.partial(self._files.tokenizer.decoder, generation.skip_special_tokens)
        request_id = request.request_id or uuid.uuid4().hex
        outputs = [_Output() for _ in range(generation.n)]
        deltas = run_choices(
            self._frontend, request_id, generation, new_decoder, priority=priority, origin=origin_of(context)
        )
        # Leaving the block cancels what still runs, also if the client has cancelled the call.
        async with contextlib.aclosing(deltas):
            async for index, delta in deltas:
                output = outputs[index]
                is_first = not output.token_ids
                output.add(delta)
                if request.stream and delta.token_ids:
                    chunk = _chunk(index, delta, output, generation, is_first)
                    await context.write(pb.GenerateResponse(chunk=chunk))
                if delta.finish_reason is not None:
                    complete = _complete(index, delta, output, generation)
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
        """Flush the prefix caches once no request runs, and return success and a message."""
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
    """End a call with UNIMPLEMENTED."""
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)
    raise AssertionError("abort raises")


def _chunk(
    index: int, delta: TokenDelta, output: _Output, generation: Generation, is_first: bool
) -> pb.GenerateStreamChunk:
    """Return the message of new tokens."""
    sampling, prompt = generation.sampling, generation.prompt
    return pb.GenerateStreamChunk(
        index=index,
        token_ids=delta.token_ids,
        prompt_tokens=len(prompt),
        completion_tokens=len(output.token_ids),
        cached_tokens=output.cached_tokens,
        output_logprobs=output_logprobs(delta.token_ids, delta.logprobs, sampling.logprobs),
        input_logprobs=input_logprobs(prompt, delta.prompt_logprobs, sampling.prompt_logprobs) if is_first else None,
    )


def _complete(index: int, last: TokenDelta, output: _Output, generation: Generation) -> pb.GenerateComplete:
    """Return the last message of a choice, which repeats all its tokens."""
    sampling, prompt = generation.sampling, generation.prompt
    return pb.GenerateComplete(
        index=index,
        output_ids=output.token_ids,
        finish_reason=last.finish_reason,
        prompt_tokens=len(prompt),
        completion_tokens=len(output.token_ids),
        cached_tokens=output.cached_tokens,
        output_logprobs=output_logprobs(output.token_ids, output.logprobs, sampling.logprobs),
        input_logprobs=input_logprobs(prompt, output.prompt_logprobs, sampling.prompt_logprobs),
        matched_token_id=last.stop if isinstance(last.stop, int) else None,
        matched_stop_str=last.stop if isinstance(last.stop, str) else None,
    )
