"""Configuration of the HTTP gateway: its keys, the checks before its start, and smg's arguments."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gimbal_jax.serving.network.api_keys import check_key, read_key_file
from gimbal_jax.serving.network.ports import check_free, is_loopback

STOP_S = 5.0
"""Seconds that the gateway has to end by itself after SIGTERM."""
NO_LIMIT_S = 10 * 365 * 86400
"""Ten years, for limits of smg that cannot be turned off."""
_NAME = re.compile(r"[A-Za-z0-9\-._]+")


@dataclass(frozen=True)
class GatewayConfig:
    """Settings of the HTTP gateway."""

    model: Path
    """Folder with the tokenizer and its chat template."""
    port: int
    host: str = "127.0.0.1"
    keys: tuple[tuple[str, str], ...] = ()
    """(name, bearer token) of each client. If empty, every client may call."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may call; ``*`` for all."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    max_payload_mib: int = 16
    max_requests: int = 1024
    """Most concurrent requests. A further request gets status 429."""
    traces_endpoint: str | None = None
    """HOST:PORT of an OpenTelemetry collector (OTLP over gRPC)."""


def load_http_keys(path: Path) -> tuple[tuple[str, str], ...]:
    """Load (name, key) of each ``KEY [NAME]`` line; ``#`` starts a comment.

    A key without a name gets its line number as name. Raises ValueError that names the line, never the key.
    """
    keys: dict[str, str] = {}

    def add(number: int, words: Sequence[str]) -> None:
        if len(words) > 2:
            raise ValueError("must be KEY [NAME]; the gateway does not support expiry")
        key, name = (*words, f"key-{number}")[:2]
        check_key(key)
        if not _NAME.fullmatch(name):
            raise ValueError("a name is letters, digits and -._")
        if key in keys.values() or name in keys:
            raise ValueError("the key or its name is in the file twice")
        keys[name] = key

    read_key_file("http_api_key_file", path, add)
    return tuple(keys.items())


def check_gateway(config: GatewayConfig) -> None:
    """Raise ValueError or OSError with the reason if a gateway could not start. Loads smg without starting it."""
    if importlib.util.find_spec("smg") is None:
        raise ValueError(
            "--http-port needs the smg gateway. Run pip install '.[gateway]' in the clone, or pip install smg."
        )
    from smg.smg_rs import get_available_reasoning_parsers, get_available_tool_call_parsers

    for field, value, known in (
        ("tool_call_parser", config.tool_call_parser, get_available_tool_call_parsers()),
        ("reasoning_parser", config.reasoning_parser, get_available_reasoning_parsers()),
    ):
        if value is not None and value not in known:
            raise ValueError(f"{field} {value}: must be one of {', '.join(sorted(known))}")
    if not (config.model / "tokenizer.json").is_file():
        raise ValueError(f"--http-port: {config.model} has no tokenizer.json, which OpenAI's API needs")
    check_free(config.host, config.port)


def open_port_warning(config: GatewayConfig) -> str | None:
    """Return a warning if clients on other hosts can call the HTTP API without a key."""
    if config.keys or is_loopback(config.host):
        return None
    return f"--http-host {config.host}: every client that reaches it may call the HTTP API. Set --http-api-key-file."


def gateway_arguments(config: GatewayConfig, grpc_port: int, metrics_port: int, control_key: str) -> list[str]:
    """Return smg's arguments.

    ``control_key`` locks smg's administration, which could redirect requests. No client gets it.
    """
    arguments: dict[str, list[Any]] = {
        "--host": [config.host],
        "--port": [config.port],
        "--worker-urls": [f"grpc://127.0.0.1:{grpc_port}"],
        "--backend": ["vllm"],
        "--model-path": [config.model],
        # There is one worker. smg has no choice between workers, and must not drop the only one if it is slow or full.
        "--policy": ["passthrough"],
        "--disable-circuit-breaker": [],
        "--disable-worker-overload-protection": [],
        "--disable-load-monitoring": [],
        "--worker-wedge-secs": [NO_LIMIT_S],
        "--worker-startup-timeout-secs": [NO_LIMIT_S],
        "--worker-startup-check-interval": [1],
        "--shutdown-grace-period-secs": [round(STOP_S)],
        "--max-payload-size": [config.max_payload_mib * 2**20],
        "--max-concurrent-requests": [config.max_requests],
        "--queue-size": [0],
        "--control-plane-api-keys": [f"gimbal:gimbal:admin:{control_key}"],
        # smg cannot turn off its own metrics.
        "--prometheus-host": ["127.0.0.1"],
        "--prometheus-port": [metrics_port],
        "--log-json": [],
        "--log-level": ["warn"],
    }
    if config.tls_cert is not None:
        arguments |= {"--tls-cert-path": [config.tls_cert], "--tls-key-path": [config.tls_key]}
    if config.cors_origins:
        arguments["--cors-allowed-origins"] = [*config.cors_origins]
    if config.tool_call_parser is not None:
        arguments["--tool-call-parser"] = [config.tool_call_parser]
    if config.reasoning_parser is not None:
        arguments["--reasoning-parser"] = [config.reasoning_parser]
    if config.traces_endpoint is not None:
        # smg makes spans at this log level only.
        arguments |= {"--enable-trace": [], "--otlp-traces-endpoint": [config.traces_endpoint], "--log-level": ["info"]}
    words = [word for flag, values in arguments.items() for word in (flag, *map(str, values))]
    return words + [word for name, key in config.keys for word in ("--tenant-api-key", f"{name}:{key}")]
