"""Interceptors of every call: authentication, limits of clients, and malformed requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextvars import ContextVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health

from gimbal_jax.exceptions import Unauthenticated
from gimbal_jax.serving.frontend.record import Origin
from gimbal_jax.serving.network.api_keys import GATEWAY, Key, authenticate

TRACEPARENT_KEY = "traceparent"
PEER_S = 1.0
"""Seconds that a check of a peer stays valid. Linux does not reuse a connection's port within a second of its end."""

_key_name = ContextVar("key_name", default="")
"""Name of the key of the call that a task serves. gRPC runs the interceptors and the handler of a call in one task."""


def origin_of(context: grpc.aio.ServicerContext) -> Origin:
    """Return the client and the trace context of a call."""
    metadata = dict(context.invocation_metadata() or ())
    return Origin(_client_of(context), str(metadata.get(TRACEPARENT_KEY, "")))


class Access(grpc.aio.ServerInterceptor):
    """Interceptor that rejects calls without a valid key, and calls beyond a client's limit of concurrent streams.

    The statuses are UNAUTHENTICATED and RESOURCE_EXHAUSTED. If ``keys`` is None, every client may call. The health
    service needs no key, because probes have none. ``limited`` are the full names of the methods whose calls count
    as streams. ``wall_clock`` is Unix time in seconds.
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
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
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
        return self._counted(handler) if method in self._limited else handler

    def _counted(self, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        async def counted(request: object, context: grpc.aio.ServicerContext) -> None:
            client = _client_of(context)
            if self._streams[client] >= self._max_streams:
                rule = f"{client} has {self._max_streams} requests already (max_streams_per_client)"
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, rule)
            self._streams[client] += 1
            try:
                await handler.unary_stream(request, context)
            finally:
                self._streams[client] -= 1
                if not self._streams[client]:
                    del self._streams[client]

        return with_serve(handler, counted)


class OwnProcesses(grpc.aio.ServerInterceptor):
    """Interceptor of our own gateway's port that identifies callers by connection, because smg cannot send a key.

    ``is_own`` returns whether a gRPC peer is a process of our user. Other peers get PERMISSION_DENIED.
    """

    def __init__(self, is_own: Callable[[str], bool], clock: Callable[[], float]) -> None:
        self._is_own = is_own
        self._clock = clock
        self._known: dict[str, float] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        serve = serve_of(handler)

        async def checked(request: object, context: grpc.aio.ServicerContext) -> object:
            if not self._is_known(context.peer()):
                text = "this port is for the server's own gateway"
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)
            _key_name.set(GATEWAY)
            return await serve(request, context)

        return with_serve(handler, checked)

    def _is_known(self, peer: str) -> bool:
        """Return whether ``peer`` is our own. Results are kept for ``PEER_S``: a check reads all connections."""
        now = self._clock()
        self._known = {peer: time for peer, time in self._known.items() if now - time < PEER_S}
        if peer not in self._known and self._is_own(peer):
            self._known[peer] = now
        return peer in self._known


def _rejection(code: grpc.StatusCode, text: str) -> grpc.RpcMethodHandler:
    async def reject(requests: object, context: grpc.aio.ServicerContext) -> None:
        await context.abort(code, text)

    # A stream_stream handler ends calls of every kind without reading their requests.
    return grpc.stream_stream_rpc_method_handler(reject)


def _client_of(context: grpc.aio.ServicerContext) -> str:
    """Return the name of the call's key, or of its certificate, or its address without the port, in this order."""
    names = context.auth_context().get("x509_common_name", ())
    certificate = names[0].decode("utf-8", "replace") if names else ""
    return _key_name.get() or certificate or _address(context.peer())


def _address(peer: str) -> str:
    """Return the address in ``ipv4:10.0.0.1:50000`` or ``ipv6:%5B::1%5D:50000``, without the port."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


Serve = Callable[[object, grpc.aio.ServicerContext], Awaitable[object]]
"""The function of a method, from request and context to the response."""


class WellFormed(grpc.aio.ServerInterceptor):
    """Interceptor that answers malformed requests with INVALID_ARGUMENT. gRPC itself answers UNKNOWN."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        serve = serve_of(handler)

        def message_or_error(data: bytes) -> object:
            try:
                return handler.request_deserializer(data)
            except DecodeError as error:
                return error

        async def checked(request: object, context: grpc.aio.ServicerContext) -> object:
            if isinstance(request, DecodeError):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request cannot be parsed: {request}")
            return await serve(request, context)

        return with_serve(handler, checked, message_or_error)


def serve_of(handler: grpc.RpcMethodHandler) -> Serve:
    """Return the function of a handler of single requests."""
    return handler.unary_stream if handler.response_streaming else handler.unary_unary


def with_serve(
    handler: grpc.RpcMethodHandler, serve: Serve, deserialize: Callable[[bytes], object] | None = None
) -> grpc.RpcMethodHandler:
    """Return a handler of the same kind with another function, and with another deserializer if one is given."""
    kind = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    return kind(serve, deserialize or handler.request_deserializer, handler.response_serializer)
