"""Opening the gRPC port, and what is said of it."""

import asyncio
import socket

import pytest

from gimbal_jax.config import NetworkConfig
from gimbal_jax.serving.rpc.listen import check_network, grpc_options, local_options, warnings
from gimbal_jax.serving.rpc.server import serve
from tests.serving.fake_server import NO_FILES, FakeCore, running_server


@pytest.mark.parametrize(
    "host, fields, mode, said",
    [
        ("127.0.0.1", (), 0o600, []),
        ("::1", (), 0o600, []),
        ("localhost", (), 0o600, []),
        ("127.0.0.1", ["api_keys"], 0o640, []),
        ("127.0.0.1", ["api_keys"], 0o644, ["every user of this machine can read it"]),
        ("0.0.0.0", (), 0o600, ["everyone who reaches 0.0.0.0 may call"]),
        ("::", (), 0o600, ["everyone who reaches :: may call"]),
        ("0.0.0.0", ["api_keys"], 0o600, ["API keys come to 0.0.0.0 in plain text"]),
        ("0.0.0.0", ["api_keys", "tls_cert", "tls_key"], 0o600, []),
        ("0.0.0.0", ["tls_cert", "tls_key", "tls_client_ca"], 0o600, []),
        ("0.0.0.0", ["tls_cert", "tls_key"], 0o644, ["tls_key", "everyone who"]),
    ],
)
def test_what_an_operator_may_not_know(tmp_path, host, fields, mode, said):
    path = tmp_path / "file"
    path.touch(mode)
    path.chmod(mode)
    found = list(warnings(NetworkConfig(host, **dict.fromkeys(fields, path))))
    assert len(found) == len(said) and all(part in text for part, text in zip(said, found, strict=True))


def test_it_is_logged_at_the_start(caplog):
    async def test():
        async with asyncio.timeout(20), running_server(FakeCore(), network=NetworkConfig("0.0.0.0", 0)):
            pass

    asyncio.run(test())
    assert "everyone who reaches 0.0.0.0 may call" in caplog.text


def test_a_network_is_checked_before_there_is_a_core(tmp_path):
    check_network(NetworkConfig(port=0))
    check_network(NetworkConfig("::1", port=0))
    with pytest.raises(ValueError, match="api_keys"):
        check_network(NetworkConfig(port=0, api_keys=tmp_path / "nothing"))
    with pytest.raises(ValueError, match="tls_cert"):
        check_network(NetworkConfig(port=0, tls_cert=tmp_path / "nothing"))


def test_a_process_of_ours_is_not_pinged_and_may_be_busy_for_long():
    def pings(options):
        return {name for name, _ in options if "keepalive" in name or "ping_timeout" in name}

    network = NetworkConfig(max_message_mib=3)
    assert not pings(local_options(network)) and len(pings(grpc_options(network))) == 4
    limit = ("grpc.max_receive_message_length", 3 * 2**20)
    assert limit in local_options(network) and limit in grpc_options(network)


def test_taken_port_is_refused():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}: the port is taken"):
            asyncio.run(serve(FakeCore(), NO_FILES, NetworkConfig(port=port), asyncio.Event()))
        with pytest.raises(OSError, match=f"127.0.0.1:{port}: Address already in use"):
            check_network(NetworkConfig(port=port))
