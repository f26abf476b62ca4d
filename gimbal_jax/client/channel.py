"""The client's gRPC channel: TLS, and an API key with every call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc

# Counts of the largest models are several megabytes; gRPC's default limit is 4.
OPTIONS = [("grpc.max_receive_message_length", 64 * 2**20)]


def open_channel(
    target: str, api_key: str | None, tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None
) -> grpc.aio.Channel:
    """Open a channel, with TLS if a certificate is given.

    Raises OSError for a file that cannot be read, and ValueError for half a certificate.
    """
    if (tls_cert is None) != (tls_key is None):
        raise ValueError("tls_cert and tls_key go together")
    interceptors = None if api_key is None else [_WithKey(api_key), _StreamWithKey(api_key)]
    if tls_ca is None and tls_cert is None:
        return grpc.aio.insecure_channel(target, options=OPTIONS, interceptors=interceptors)
    ca, key, chain = (None if path is None else path.read_bytes() for path in (tls_ca, tls_key, tls_cert))
    credentials = grpc.ssl_channel_credentials(ca, key, chain)
    return grpc.aio.secure_channel(target, credentials, options=OPTIONS, interceptors=interceptors)


class _Key:
    """The authorization metadata of an API key."""

    def __init__(self, api_key: str) -> None:
        self._authorization = ("authorization", f"Bearer {api_key}")

    def _added_to(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), self._authorization)
        return details._replace(metadata=metadata)


# gRPC needs one interceptor for each kind of call, and one class cannot serve two kinds.
class _WithKey(_Key, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, object], Awaitable[grpc.aio.UnaryUnaryCall]],
        client_call_details: grpc.aio.ClientCallDetails,
        request: object,
    ) -> grpc.aio.UnaryUnaryCall:
        return await continuation(self._added_to(client_call_details), request)


class _StreamWithKey(_Key, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, object], Awaitable[grpc.aio.UnaryStreamCall]],
        client_call_details: grpc.aio.ClientCallDetails,
        request: object,
    ) -> grpc.aio.UnaryStreamCall:
        return await continuation(self._added_to(client_call_details), request)
