"""Rejection of request bytes that cannot be parsed, without a traceback in our log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc
from google.protobuf.message import DecodeError

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
