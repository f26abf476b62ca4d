"""A small asyncio client: text or tokens in, chunks out, and what the control service knows.

async with GimbalClient("127.0.0.1:50051") as client:
    async for chunk in client.generate("Once upon a time", max_tokens=32):
        print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import zipfile
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

from gimbal_jax.client.channel import open_channel
from gimbal_jax.client.chunks import chunk_of, new_text
from gimbal_jax.client.records import (
    ERRORS,
    Chunk,
    ClientError,
    Decisions,
    Placement,
    ServerStatus,
    Traces,
    record_of,
)
from gimbal_jax.protos import control_pb2, control_pb2_grpc
from gimbal_jax.scheduler.counts_file import save_counts
from gimbal_jax.scheduler.dispatch_decision import Decision, DispatchRecord
from gimbal_jax.scheduler.trace import Trace
from gimbal_jax.serving.engine.request import PRIORITY_KEY
from gimbal_jax.serving.placement.records import PlacementRecord
from gimbal_jax.serving.text.tokenizer import FILES, Tokenizer


class GimbalClient:
    """One connection. ``engine`` and ``control`` are the raw stubs, for calls that have no method here.

    ``api_key`` goes with every call. With ``tls_ca``, the PEM of the authority that signed the server's certificate,
    the connection is TLS; ``tls_cert`` and ``tls_key`` are the client's own, for mutual TLS.
    Every method raises a ClientError where the call fails.
    """

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        tls_ca: Path | None = None,
        tls_cert: Path | None = None,
        tls_key: Path | None = None,
    ) -> None:
        self._channel = open_channel(target, api_key, tls_ca, tls_cert, tls_key)
        self.engine = pb_grpc.VllmEngineStub(self._channel)
        self.control = control_pb2_grpc.ControlStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._tokenizer: Tokenizer | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._channel.close()

    async def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        max_tokens: int | None = None,
        min_tokens: int = 0,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        n: int = 1,
        seed: int | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        logit_bias: Mapping[int, float] | None = None,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        truncate_prompt_tokens: int | None = None,
        json_schema: str | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        stream: bool = True,
        request_id: str = "",
        engine: int | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Chunk]:
        """Yield chunks, the last of each output with a finish_reason; one chunk for each if not ``stream``.

        The prompt is a text or token ids. The parameters are vLLM's. ``engine`` pins the request to one. Lower
        ``priority`` runs first, where the server orders by it. Leaving the iteration (``aclose``) cancels the request.
        """
        if (prompt is None) == (token_ids is None):
            raise ValueError("give either prompt or token_ids")
        params = pb.SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            repetition_penalty=repetition_penalty,
            n=n,
            seed=seed,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logit_bias=logit_bias,
            stop=stop,
            include_stop_str_in_output=include_stop_str_in_output,
            stop_token_ids=stop_token_ids,
            skip_special_tokens=True,  # as the text is decoded here
            ignore_eos=ignore_eos,
            truncate_prompt_tokens=truncate_prompt_tokens,
            json_schema=json_schema,
            regex=regex,
            choice=None if choice is None else pb.ChoiceConstraint(choices=choice),
        )
        request = pb.GenerateRequest(
            request_id=request_id,
            text=prompt,
            tokenized=None if token_ids is None else pb.TokenizedInput(input_ids=token_ids),
            sampling_params=params,
            stream=stream,
            data_parallel_rank=engine,
        )
        texts = None if prompt is None else [new_text(params, await self.tokenizer()) for _ in range(n)]
        metadata = ((PRIORITY_KEY, str(priority)),) if priority else None
        call = self.engine.Generate(request, timeout=timeout_s, metadata=metadata)
        try:
            with _client_errors():
                async for response in call:
                    yield chunk_of(response, stream, texts)
        finally:
            call.cancel()

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncGenerator[Chunk]:
        """Like ``generate``, for a conversation in OpenAI's form, rendered here with the model's chat template.

        ``tools`` are in OpenAI's form. ``template_variables`` go to the template, such as {"enable_thinking": False}.
        Raises ValueError if there are no messages, no template, or the template rejects the messages.
        """
        if not messages:
            raise ValueError("messages must hold at least one message")
        # Templates ask whether there are tools. An empty list would count as some.
        variables = {**(template_variables or {}), "tools": tools or None}
        prompt = (await self.tokenizer()).render_chat(messages, **variables)
        async with contextlib.aclosing(self.generate(prompt, **options)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def abort(self, *request_ids: str) -> None:
        with _client_errors():
            await self.engine.Abort(pb.AbortRequest(request_ids=request_ids))

    async def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, fetched once."""
        if self._tokenizer is None:
            with _client_errors():
                chunks = [chunk async for chunk in self.engine.GetTokenizer(common_pb2.GetTokenizerRequest())]
            data = b"".join(chunk.data for chunk in chunks)
            if hashlib.sha256(data).hexdigest() != chunks[-1].sha256:
                raise ClientError(grpc.StatusCode.DATA_LOSS, "the tokenizer's checksum is wrong")
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                names = set(archive.namelist()) & set(FILES)
                self._tokenizer = Tokenizer({name: archive.read(name).decode("utf-8") for name in names})
        return self._tokenizer

    async def is_serving(self) -> bool:
        """False while the server warms up or drains. Raises Unavailable where there is none."""
        with _client_errors():
            response = await self._health.Check(health_pb2.HealthCheckRequest())
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def placement(self) -> Placement:
        with _client_errors():
            response = await self.control.GetPlacement(control_pb2.GetPlacementRequest())
        slot_of_expert_LE = np.array(response.slot_of_expert_LE, np.int32).reshape(response.layers, response.experts)
        return Placement(slot_of_expert_LE, response.ranks, response.sources)

    async def counts(self, scope: Literal["window", "total"] = "window") -> np.ndarray:
        """Expert tokens [L, S, E] of the last closed window, or since the server started; int64."""
        with _client_errors():
            response = await self.control.GetCounts(control_pb2.GetCountsRequest(scope=scope.upper()))
        shape = response.layers, response.sources, response.experts
        return np.array(response.counts_LSE, np.int64).reshape(shape)

    async def save_counts(self, path: Path, scope: Literal["window", "total"] = "window") -> None:
        """Write ``counts`` to a counts file, with the placement in force now. Raises OSError where it cannot."""
        counts_LSE, placement, status = await asyncio.gather(self.counts(scope), self.placement(), self.status())
        meta = {"ranks": placement.ranks, "scope": scope, "step": status.steps.count, "time": status.now}
        save_counts(path, counts_LSE, placement.slot_of_expert_LE, meta)

    async def traces(self) -> Traces:
        with _client_errors():
            response = await self.control.GetTraces(control_pb2.GetTracesRequest())
        traces = tuple(record_of(Trace, trace) for trace in response.traces)
        return Traces(response.now, traces, response.central_queue)

    async def decisions(self, last: int = 0) -> Decisions:
        """The ``last`` dispatch decisions (0: all that are kept), and the last placement decisions."""
        with _client_errors():
            response = await self.control.GetDecisions(control_pb2.GetDecisionsRequest(last=last))
        return Decisions(
            response.now,
            tuple(_dispatch_record(record) for record in response.dispatches),
            tuple(record_of(PlacementRecord, record) for record in response.placements),
        )

    async def status(self) -> ServerStatus:
        with _client_errors():
            response = await self.control.GetStatus(control_pb2.GetStatusRequest())
        return record_of(ServerStatus, response)

    async def rebalance(self) -> None:
        """Ask for a placement decision at the next step."""
        with _client_errors():
            await self.control.Rebalance(control_pb2.RebalanceRequest())


@contextlib.contextmanager
def _client_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise ERRORS.get(error.code(), ClientError)(error.code(), error.details() or "") from error


def _dispatch_record(record: control_pb2.Dispatch) -> DispatchRecord:
    terms = {term.name: tuple(term.values_S) for term in record.terms}
    return DispatchRecord(record.request_id, record.time, Decision(record.engine, record.rule, terms))
