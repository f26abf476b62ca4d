"""Bytes that are no message of their method's type: the client's fault, and no traceback in our log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc
from google.protobuf.message import DecodeError

Serve = Callable[[object, grpc.aio.ServicerContext], Awaitable[object]]
"""What a method does with a request."""


class WellFormed(grpc.aio.ServerInterceptor):
    """Answers them with INVALID_ARGUMENT; gRPC itself takes them for a fault of the server (UNKNOWN)."""

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
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request is no message: {request}")
            return await serve(request, context)

        return with_serve(handler, checked, message_or_error)


def serve_of(handler: grpc.RpcMethodHandler) -> Serve:
    """What a handler of single requests does."""
    return handler.unary_stream if handler.response_streaming else handler.unary_unary


def with_serve(
    handler: grpc.RpcMethodHandler, serve: Serve, deserialize: Callable[[bytes], object] | None = None
) -> grpc.RpcMethodHandler:
    """A handler of the same kind that does something else, and may read requests in another way."""
    kind = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    return kind(serve, deserialize or handler.request_deserializer, handler.response_serializer)
