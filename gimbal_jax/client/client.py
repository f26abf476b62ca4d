"""An asyncio client: it sends text or token ids, yields chunks, and reads the state of the server.

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
from typing import Any, Literal, Self, Unpack

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

from gimbal_jax.client.channel import open_channel
from gimbal_jax.client.chunks import chunk_of, new_text
from gimbal_jax.client.options import SamplingOptions, generate_request
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
    """A connection to one server, to use as ``async with``.

    target: ``host:port`` of the server's gRPC port.
    api_key: key that is sent with every call; None for a server without keys.
    tls_ca: PEM file of the authority that signed the server's certificate; None for a connection without TLS.
    tls_cert, tls_key: PEM files of the client's own certificate and key, for mutual TLS; both or none.

    The constructor raises ValueError for half a certificate and OSError for a file that cannot be read.
    Every method raises a ClientError if its call fails (``client.records``): Unavailable without a server,
    Unauthenticated without a valid key, Unsupported for a method that the server does not have.
    ``engine`` and ``control`` are the gRPC stubs, for calls that have no method here.
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
        stream: bool = True,
        request_id: str = "",
        engine: int | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncGenerator[Chunk]:
        """Yield the chunks of a request's outputs; the last chunk of each output has a finish_reason.

        Leaving the iteration (``aclose``) cancels the request and frees its memory.

        prompt, token_ids: the prompt as text or as token ids, exactly one of them. Chunks have text only for a text.
        stream: whether chunks come as tokens do; False gives one chunk for each output.
        request_id: id for ``abort`` and logs, at most 256 characters; empty lets the server choose one.
        engine: index of the engine to run on; None leaves the choice to the server.
        priority: in [-100, 100], lower runs first; other values than 0 need a server with ``--queue priority``.
        timeout_s: seconds until the request ends with DeadlineExceeded; None waits without limit.
        sampling: see ``SamplingOptions``.

        Raises ValueError for a missing prompt or an unknown option, InvalidRequest for a value out of range,
        AlreadyRunning for a request_id in use, Overloaded for a full queue, Unavailable for a server that warms up,
        drains or stops, and ClientError with code INTERNAL if the engine fails the request.
        """
        request = generate_request(prompt, token_ids, stream, request_id, engine, **sampling)
        params = request.sampling_params
        texts = None if prompt is None else [new_text(params, await self.tokenizer()) for _ in range(params.n or 1)]
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
        """Yield the chunks of answers to a conversation, which the client renders with the model's chat template.

        messages, tools: messages and tools in OpenAI's form.
        template_variables: variables for the template, such as {"enable_thinking": False}.
        options: the keywords of ``generate``.

        Raises ValueError if there are no messages or no template, or if the template rejects the messages.
        Other errors are those of ``generate``.
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
        """End requests with finish_reason "abort". Unknown ids are ignored."""
        with _client_errors():
            await self.engine.Abort(pb.AbortRequest(request_ids=request_ids))

    async def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer, fetched once per connection.

        Raises ClientError with code NOT_FOUND if the model has none, and DATA_LOSS if the download is damaged.
        """
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
        """Return whether the server takes requests: False while it warms up or drains.

        Raises Unavailable if no server listens.
        """
        with _client_errors():
            response = await self._health.Check(health_pb2.HealthCheckRequest())
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def placement(self) -> Placement:
        """Return the current placement of experts."""
        with _client_errors():
            response = await self.control.GetPlacement(control_pb2.GetPlacementRequest())
        slot_of_expert_LE = np.array(response.slot_of_expert_LE, np.int32).reshape(response.layers, response.experts)
        return Placement(slot_of_expert_LE, response.ranks, response.sources)

    async def counts(self, scope: Literal["window", "total"] = "window") -> np.ndarray:
        """Return expert token counts, int64 [L, S, E] by MoE layer, source engine and expert.

        scope: "window" counts the last closed window, "total" all steps since the server started.
        """
        with _client_errors():
            response = await self.control.GetCounts(control_pb2.GetCountsRequest(scope=scope.upper()))
        shape = response.layers, response.sources, response.experts
        return np.array(response.counts_LSE, np.int64).reshape(shape)

    async def save_counts(self, path: Path, scope: Literal["window", "total"] = "window") -> None:
        """Write ``counts`` and the current placement to a counts file. Raises OSError if it cannot be written."""
        counts_LSE, placement, status = await asyncio.gather(self.counts(scope), self.placement(), self.status())
        meta = {"ranks": placement.ranks, "scope": scope, "step": status.steps.count, "time": status.now}
        save_counts(path, counts_LSE, placement.slot_of_expert_LE, meta)

    async def traces(self) -> Traces:
        """Return the latest trace of each engine; none before the first."""
        with _client_errors():
            response = await self.control.GetTraces(control_pb2.GetTracesRequest())
        traces = tuple(record_of(Trace, trace) for trace in response.traces)
        return Traces(response.now, traces, response.central_queue)

    async def decisions(self, last: int = 0) -> Decisions:
        """Return the last dispatch and placement decisions, oldest first.

        last: number of dispatch decisions; 0 means all that the server keeps.
        """
        with _client_errors():
            response = await self.control.GetDecisions(control_pb2.GetDecisionsRequest(last=last))
        return Decisions(
            response.now,
            tuple(_dispatch_record(record) for record in response.dispatches),
            tuple(record_of(PlacementRecord, record) for record in response.placements),
        )

    async def status(self) -> ServerStatus:
        """Return counters and gauges of the server."""
        with _client_errors():
            response = await self.control.GetStatus(control_pb2.GetStatusRequest())
        return record_of(ServerStatus, response)

    async def rebalance(self) -> None:
        """Ask for a placement decision without waiting for a full window. Returns before the decision is made.

        The server decides after its current step, on the traffic since the last window; an idle one takes about two
        trace periods (0.2 s). ``decisions`` then has the new record. With one rank there is nothing to decide.
        """
        with _client_errors():
            await self.control.Rebalance(control_pb2.RebalanceRequest())


@contextlib.contextmanager
def _client_errors() -> Iterator[None]:
    """Raise gRPC errors as the ClientError of their status."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise ERRORS.get(error.code(), ClientError)(error.code(), error.details() or "") from error


def _dispatch_record(record: control_pb2.Dispatch) -> DispatchRecord:
    terms = {term.name: tuple(term.values_S) for term in record.terms}
    return DispatchRecord(record.request_id, record.time, Decision(record.engine, record.rule, terms))
