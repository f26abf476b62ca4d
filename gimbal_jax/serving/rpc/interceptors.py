"""Checks at every gRPC call: API keys, limits of each client, and malformed requests.

``Access`` and ``WellFormed`` guard the public port, ``OwnProcesses`` the port of our own HTTP gateway.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health

from gimbal_jax.exceptions import Unauthenticated
from gimbal_jax.serving.frontend.record import Origin
from gimbal_jax.serving.network.api_keys import GATEWAY, Key, authenticate

TRACEPARENT_KEY = "traceparent"
"""gRPC metadata key of the W3C trace context."""
PEER_S = 1.0
"""Seconds for which a peer stays known. Linux gives the port of a closed connection to no other process within one."""

type Context = grpc.aio.ServicerContext
type Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]]
"""Function that finds the handler of a call."""
type Guard = Callable[[object, Context], AbstractAsyncContextManager[None]]
"""Context manager around a call, from its request and context; it rejects the call by ``context.abort``."""

_key_name = ContextVar("key_name", default="")
"""Name of the API key of the current call. gRPC runs interceptors and handler of a call in one task."""


def origin_of(context: Context) -> Origin:
    """Return the client and the trace context of a call."""
    metadata = dict(context.invocation_metadata() or ())
    return Origin(_client_of(context), str(metadata.get(TRACEPARENT_KEY, "")))


class Access(grpc.aio.ServerInterceptor):
    """Rejects calls without a valid key (UNAUTHENTICATED), and streams beyond a client's limit (RESOURCE_EXHAUSTED).

    Without ``keys`` every client may call. Health needs no key, since probes carry none.
    ``limited`` are the full names of the methods that count as streams. ``wall_clock`` is Unix time in seconds.
    """

    def __init__(
        self,
        keys: Sequence[Key] | None,
        limited: Collection[str],
        max_streams: int,
        wall_clock: Callable[[], float],
    ) -> None:
        self._keys = keys
        self._limited = limited
        self._max_streams = max_streams
        self._wall_clock = wall_clock
        self._streams: Counter[str] = Counter()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        method = handler_call_details.method
        if method.startswith(f"/{health.SERVICE_NAME}/"):
            return await continuation(handler_call_details)
        if self._keys is not None:
            metadata = dict(handler_call_details.invocation_metadata or ())
            try:
                key = authenticate(metadata.get("authorization"), self._keys, self._wall_clock())
            except Unauthenticated as error:
                return _rejection(grpc.StatusCode.UNAUTHENTICATED, str(error))
            _key_name.set(key.name)
        handler = await continuation(handler_call_details)
        return _guarded(handler, self._count_stream) if method in self._limited else handler

    @contextlib.asynccontextmanager
    async def _count_stream(self, request: object, context: Context) -> AsyncIterator[None]:
        client = _client_of(context)
        if self._streams[client] >= self._max_streams:
            rule = f"{client} has {self._max_streams} requests already (max_streams_per_client)"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, rule)
        self._streams[client] += 1
        try:
            yield
        finally:
            self._streams[client] -= 1
            if not self._streams[client]:
                del self._streams[client]


class OwnProcesses(grpc.aio.ServerInterceptor):
    """Rejects calls from processes of other users (PERMISSION_DENIED), for the port of our own HTTP gateway.

    The gateway can send no key, so the connection identifies it. ``is_own`` returns whether a gRPC peer is a process
    of our user. ``clock`` is monotonic, in seconds.
    """

    def __init__(self, is_own: Callable[[str], bool], clock: Callable[[], float]) -> None:
        self._is_own = is_own
        self._clock = clock
        self._known: dict[str, float] = {}

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        return None if handler is None else _guarded(handler, self._check_peer)

    @contextlib.asynccontextmanager
    async def _check_peer(self, request: object, context: Context) -> AsyncIterator[None]:
        if not self._is_known(context.peer()):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "this port is for the server's own gateway")
        _key_name.set(GATEWAY)
        yield

    def _is_known(self, peer: str) -> bool:
        """Return whether the peer is ours. The answer is kept for ``PEER_S``: it comes from a table of all sockets."""
        now = self._clock()
        self._known = {peer: time for peer, time in self._known.items() if now - time < PEER_S}
        if peer not in self._known and self._is_own(peer):
            self._known[peer] = now
        return peer in self._known


class WellFormed(grpc.aio.ServerInterceptor):
    """Rejects bytes that cannot be parsed with INVALID_ARGUMENT. gRPC itself would answer UNKNOWN, a server error."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler

        def message_or_error(data: bytes) -> object:
            try:
                return handler.request_deserializer(data)
            except DecodeError as error:
                return error

        return _guarded(handler, self._check_message, message_or_error)

    @contextlib.asynccontextmanager
    async def _check_message(self, request: object, context: Context) -> AsyncIterator[None]:
        if isinstance(request, DecodeError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request cannot be parsed: {request}")
        yield


def _guarded(
    handler: grpc.RpcMethodHandler, guard: Guard, deserialize: Callable[[bytes], object] | None = None
) -> grpc.RpcMethodHandler:
    """Return a handler of single requests that serves inside ``guard``, and reads requests by ``deserialize``."""
    serve = handler.unary_stream if handler.response_streaming else handler.unary_unary

    async def serve_guarded(request: object, context: Context) -> object:
        async with guard(request, context):
            return await serve(request, context)

    kind = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    return kind(serve_guarded, deserialize or handler.request_deserializer, handler.response_serializer)


def _rejection(code: grpc.StatusCode, text: str) -> grpc.RpcMethodHandler:
    """Return a handler that ends calls of every kind without reading what they send."""

    async def reject(requests: object, context: Context) -> None:
        await context.abort(code, text)

    return grpc.stream_stream_rpc_method_handler(reject)


def _client_of(context: Context) -> str:
    """Return the name of the call's key; without one that of its certificate, then its address without the port."""
    names = context.auth_context().get("x509_common_name", ())
    certificate = names[0].decode("utf-8", "replace") if names else ""
    return _key_name.get() or certificate or _address(context.peer())


def _address(peer: str) -> str:
    """Return ``ipv4:10.0.0.1:50000`` or ``ipv6:%5B::1%5D:50000`` without kind and port."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
