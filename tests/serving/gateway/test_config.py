"""The gateway's keys and arguments, and the checks before its start."""

import importlib.util
import socket
from pathlib import Path

import pytest

from gimbal_jax.serving.gateway.config import (
    GatewayConfig,
    check_gateway,
    gateway_arguments,
    load_http_keys,
    open_port_warning,
)

KEY, OTHER = "a-key-of-16-chars", "another-key-of-more/than+16=="


def test_keys_have_names_and_comments_are_ignored(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# clients\n\n{KEY} alice  # from the office\n{OTHER}\n")
    assert load_http_keys(path) == (("alice", KEY), ("key-4", OTHER))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains no key"),
        ("# none\n", "contains no key"),
        ("short", "line 1: a key is at least 16"),
        (f"{KEY}:colon", "line 1: a key is at least 16"),
        (f"{KEY} na:me", "line 1: a name is letters"),
        (f"{KEY} alice\n{KEY} bob", "line 2: the key or its name is in the file twice"),
        (f"{KEY} alice\n{OTHER} alice", "line 2: the key or its name is in the file twice"),
        (f"{KEY} alice 2030-01-01T00:00:00Z", "line 1: must be KEY .NAME.; the gateway does not support expiry"),
    ],
)
def test_bad_key_file_error_names_the_line_but_no_key(tmp_path, text, message):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as rejected:
        load_http_keys(path)
    assert str(path) in str(rejected.value)
    assert KEY not in str(rejected.value) and OTHER not in str(rejected.value)


def test_smg_understands_every_argument():
    from smg.launch_router import parse_router_args

    config = GatewayConfig(
        model=Path("/models/m"),
        port=8000,
        host="::1",
        keys=(("alice", KEY), ("bob", OTHER)),
        cors_origins=("https://a.example", "https://b.example"),
        tls_cert=Path("/tls/cert.pem"),
        tls_key=Path("/tls/key.pem"),
        tool_call_parser="qwen",
        reasoning_parser="qwen3",
        max_payload_mib=3,
        max_requests=77,
        traces_endpoint="collector:4317",
    )
    got = parse_router_args(gateway_arguments(config, 50051, 29000, "control"))
    assert (got.host, got.port, got.worker_urls) == ("::1", 8000, ["grpc://127.0.0.1:50051"])
    assert (got.model_path, got.tool_call_parser, got.reasoning_parser) == ("/models/m", "qwen", "qwen3")
    assert got.tenant_api_keys == [("alice", KEY), ("bob", OTHER)]
    assert [(role, key) for *_, key, role in got.control_plane_api_keys] == [("admin", "control")]
    assert got.cors_allowed_origins == ["https://a.example", "https://b.example"]
    assert (got.server_cert_path, got.server_key_path) == ("/tls/cert.pem", "/tls/key.pem")
    assert (got.max_payload_size, got.max_concurrent_requests, got.queue_size) == (3 * 2**20, 77, 0)
    assert (got.prometheus_host, got.prometheus_port) == ("127.0.0.1", 29000)
    assert (got.enable_trace, got.otlp_traces_endpoint, got.log_level) == (True, "collector:4317", "info")


def test_unset_options_are_off():
    from smg.launch_router import parse_router_args

    got = parse_router_args(gateway_arguments(GatewayConfig(Path("/m"), 8000), 1, 2, "control"))
    assert (got.host, got.tenant_api_keys, got.api_key, got.cors_allowed_origins) == ("127.0.0.1", [], None, [])
    assert (got.server_cert_path, got.enable_trace, got.tool_call_parser, got.reasoning_parser) == (None, False) + (
        None,
    ) * 2
    # No client may register other workers, so the administration has a key even if clients need none.
    assert got.control_plane_api_keys


def test_missing_or_binary_key_file_error_names_the_file(tmp_path):
    with pytest.raises(ValueError, match=f"http_api_key_file {tmp_path}/none: No such file"):
        load_http_keys(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=f"http_api_key_file {tmp_path}/binary"):
        load_http_keys(tmp_path / "binary")


@pytest.mark.parametrize(
    ("host", "keys", "warns"),
    [
        ("127.0.0.1", (), False),
        ("localhost", (), False),
        ("::1", (), False),
        ("0.0.0.0", (), True),
        ("example.com", (), True),
        ("0.0.0.0", (("alice", KEY),), False),
    ],
)
def test_open_port_off_loopback_gives_a_warning(host, keys, warns):
    warning = open_port_warning(GatewayConfig(Path("/m"), 8000, host=host, keys=keys))
    assert (warning is not None) == warns
    assert warning is None or (host in warning and "--http-api-key-file" in warning)


@pytest.fixture
def model(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def test_check_rejects_a_gateway_that_could_not_start(monkeypatch, model, tmp_path_factory):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"):
            check_gateway(GatewayConfig(model, port))
    check_gateway(GatewayConfig(model, port, tool_call_parser="qwen", reasoning_parser="qwen3"))
    with pytest.raises(ValueError, match=r"tool_call_parser magic: must be one of .*qwen"):
        check_gateway(GatewayConfig(model, port, tool_call_parser="magic"))
    with pytest.raises(ValueError, match=r"reasoning_parser magic: must be one of .*qwen3"):
        check_gateway(GatewayConfig(model, port, reasoning_parser="magic"))
    bare = tmp_path_factory.mktemp("bare")
    with pytest.raises(ValueError, match=f"{bare} has no tokenizer.json"):
        check_gateway(GatewayConfig(bare, port))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install '\.\[gateway\]' in the clone, or pip install smg"):
        check_gateway(GatewayConfig(model, port))
