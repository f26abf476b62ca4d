"""The gRPC port: how it is opened, what it bears, and what an operator should know of it."""

from __future__ import annotations

import ipaddress
import socket
import stat
from collections.abc import Iterator

import grpc

from gimbal_jax.config import NetworkConfig
from gimbal_jax.serving.network.api_keys import load_keys
from gimbal_jax.serving.network.tls import server_credentials

KEEPALIVE_TIME_S = 30.0
KEEPALIVE_TIMEOUT_S = 10.0
"""A connection that is silent for the first is pinged; one that leaves that unanswered for the second is closed."""
HANDSHAKE_S = 10.0
"""Time for a new connection to say what it wants, TLS included."""
MAX_METADATA_BYTES = 16 * 1024
"""Longest metadata of a call."""
MAX_CONNECTION_STREAMS = 4096
"""Most calls of one connection at once; more of them wait in the client."""


def grpc_options(network: NetworkConfig) -> list[tuple[str, int]]:
    """Of a gRPC server that clients call."""
    return [
        *local_options(network),
        # Find clients that vanished, so that their requests free their pages, and their connections too.
        ("grpc.keepalive_time_ms", round(KEEPALIVE_TIME_S * 1000)),
        # gRPC takes both for an unanswered ping; the second is a minute by default.
        ("grpc.keepalive_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.http2.ping_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1000)),
    ]


def local_options(network: NetworkConfig) -> list[tuple[str, int]]:
    """Of a gRPC server that a process of this machine calls: its end is seen at once, and it may be busy for long."""
    return [
        # Two servers on one port would share it silently.
        ("grpc.so_reuseport", 0),
        # Clients with long silent calls ping to keep them: by default the server answers that with GOAWAY
        # too_many_pings.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_concurrent_streams", MAX_CONNECTION_STREAMS),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_receive_message_length", network.max_message_mib * 2**20),
    ]


def listen(server: grpc.aio.Server, network: NetworkConfig) -> int:
    """Open the port, and return it. Raises ValueError where certificates are no good, OSError where it is taken."""
    credentials = server_credentials(network)
    address = _address(network.host, network.port)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: the port is taken, or the host is not of this machine") from error


def check_network(network: NetworkConfig) -> None:
    """Raises what ``serve`` would: for those who have much to do before they call it."""
    if network.api_keys is not None:
        load_keys(network.api_keys)
    server_credentials(network)
    check_free(network.host, network.port)


def check_free(host: str, port: int) -> None:
    """Raises OSError where another has the port, or the host is not of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # Connections of an earlier server that are still closing do not hold the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OSError(f"cannot listen on {_address(host, port)}: {error.strerror}") from error


def warnings(network: NetworkConfig) -> Iterator[str]:
    """What an operator may not know. An address that is not on loopback was chosen, but perhaps not its consequence."""
    for field, path in (("api_keys", network.api_keys), ("tls_key", network.tls_key)):
        if path is not None and path.stat().st_mode & stat.S_IROTH:
            yield f"{field} {path}: every user of this machine can read it (chmod 600)"
    if _is_loopback(network.host):
        return
    if network.api_keys is None and network.tls_client_ca is None:
        yield f"everyone who reaches {network.host} may call: there are no api_keys and no tls_client_ca"
    elif network.tls_cert is None:
        yield f"API keys come to {network.host} in plain text: there is no tls_cert"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
