"""The gRPC port: how it is opened, its limits, and warnings for the operator."""

from __future__ import annotations

import stat
from collections.abc import Iterator

import grpc

from gimbal_jax.config import NetworkConfig
from gimbal_jax.serving.network.api_keys import load_keys
from gimbal_jax.serving.network.ports import address_of, check_free, is_loopback
from gimbal_jax.serving.network.tls import server_credentials

KEEPALIVE_TIME_S = 30.0
KEEPALIVE_TIMEOUT_S = 10.0
"""The server pings a connection that is silent for the first, and closes it without an answer in the second."""
HANDSHAKE_S = 10.0
"""Seconds that a new connection has for its handshake, TLS included."""
MAX_METADATA_BYTES = 16 * 1024
"""Most metadata of a call, in bytes."""
MAX_CONNECTION_STREAMS = 4096
"""Most concurrent calls of one connection. Further calls wait in the client."""


def grpc_options(network: NetworkConfig) -> list[tuple[str, int]]:
    """Return the options of a gRPC server that clients call."""
    return [
        *local_options(network),
        # Find clients that vanished, so that their requests free their pages and their connections close.
        ("grpc.keepalive_time_ms", round(KEEPALIVE_TIME_S * 1000)),
        # Both limit how long a ping may be unanswered. The second is a minute by default.
        ("grpc.keepalive_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.http2.ping_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1000)),
    ]


def local_options(network: NetworkConfig) -> list[tuple[str, int]]:
    """Return the options of a gRPC server that only a process of this host calls.

    They have no keepalive: the end of a local process closes its connection, and a busy one must not time out.
    """
    return [
        # With reuse, two servers could share one port silently.
        ("grpc.so_reuseport", 0),
        # Clients with long silent calls send pings. By default the server answers them with GOAWAY too_many_pings.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_concurrent_streams", MAX_CONNECTION_STREAMS),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_receive_message_length", network.max_message_mib * 2**20),
    ]


def listen(server: grpc.aio.Server, network: NetworkConfig) -> int:
    """Open the port and return it. Raises ValueError for bad certificates, OSError if the port is taken."""
    credentials = server_credentials(network)
    address = address_of(network.host, network.port)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: the port is taken, or this host has no such address") from error


def check_network(network: NetworkConfig) -> None:
    """Raise the errors of ``serve`` early, before a caller loads a model. Raises ValueError or OSError."""
    if network.api_keys is not None:
        load_keys(network.api_keys)
    server_credentials(network)
    check_free(network.host, network.port)


def warnings(network: NetworkConfig) -> Iterator[str]:
    """Yield warnings about readable key files, and about an address off loopback without keys or TLS."""
    for field, path in (("api_keys", network.api_keys), ("tls_key", network.tls_key)):
        if path is not None and path.stat().st_mode & stat.S_IROTH:
            yield f"{field} {path}: every user of this host can read it. Run chmod 600."
    if is_loopback(network.host):
        return
    if network.api_keys is None and network.tls_client_ca is None:
        yield f"host {network.host}: every client that reaches it may call. Set api_keys or tls_client_ca."
    elif network.tls_cert is None:
        yield f"host {network.host}: clients send their API keys in plain text. Set tls_cert and tls_key."
