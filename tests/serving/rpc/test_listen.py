"""Opening the gRPC port, and the warnings about it."""

import asyncio
import socket

import pytest

from gimbal_jax.config import NetworkConfig
from gimbal_jax.serving.rpc.listen import check_network, grpc_options, local_options, warnings
from gimbal_jax.serving.rpc.server import serve
from tests.serving.fake_server import NO_FILES, FakeCore, running_server


@pytest.mark.parametrize(
    "host, fields, mode, parts",
    [
        ("127.0.0.1", (), 0o600, []),
        ("::1", (), 0o600, []),
        ("localhost", (), 0o600, []),
        ("127.0.0.1", ["api_keys"], 0o640, []),
        ("127.0.0.1", ["api_keys"], 0o644, ["every user of this host can read it"]),
        ("0.0.0.0", (), 0o600, ["host 0.0.0.0: every client that reaches it may call"]),
        ("::", (), 0o600, ["host ::: every client that reaches it may call"]),
        ("0.0.0.0", ["api_keys"], 0o600, ["host 0.0.0.0: clients send their API keys in plain text"]),
        ("0.0.0.0", ["api_keys", "tls_cert", "tls_key"], 0o600, []),
        ("0.0.0.0", ["tls_cert", "tls_key", "tls_client_ca"], 0o600, []),
        ("0.0.0.0", ["tls_cert", "tls_key"], 0o644, ["tls_key", "every client"]),
    ],
)
def test_warnings_name_readable_keys_and_open_addresses(tmp_path, host, fields, mode, parts):
    path = tmp_path / "file"
    path.touch(mode)
    path.chmod(mode)
    found = list(warnings(NetworkConfig(host, **dict.fromkeys(fields, path))))
    assert len(found) == len(parts) and all(part in text for part, text in zip(parts, found, strict=True))


def test_warnings_are_logged_at_the_start(caplog):
    async def test():
        async with asyncio.timeout(120), running_server(FakeCore(), network=NetworkConfig("0.0.0.0", 0)):
            pass

    asyncio.run(test())
    assert "host 0.0.0.0: every client that reaches it may call" in caplog.text


def test_network_is_checked_without_a_core(tmp_path):
    check_network(NetworkConfig(port=0))
    check_network(NetworkConfig("::1", port=0))
    with pytest.raises(ValueError, match="api_keys"):
        check_network(NetworkConfig(port=0, api_keys=tmp_path / "nothing"))
    with pytest.raises(ValueError, match="tls_cert"):
        check_network(NetworkConfig(port=0, tls_cert=tmp_path / "nothing"))


def test_local_options_have_no_keepalive():
    def pings(options):
        return {name for name, _ in options if "keepalive" in name or "ping_timeout" in name}

    network = NetworkConfig(max_message_mib=3)
    assert not pings(local_options(network)) and len(pings(grpc_options(network))) == 4
    limit = ("grpc.max_receive_message_length", 3 * 2**20)
    assert limit in local_options(network) and limit in grpc_options(network)


def test_taken_port_is_rejected():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}: the port is taken"):
            asyncio.run(serve(FakeCore(), NO_FILES, NetworkConfig(port=port), asyncio.Event()))
        with pytest.raises(OSError, match=f"127.0.0.1:{port}: Address already in use"):
            check_network(NetworkConfig(port=port))
