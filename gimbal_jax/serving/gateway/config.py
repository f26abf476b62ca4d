"""What HTTP clients get of the gateway, as smg's arguments, and why it could not start."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gimbal_jax.serving.network.api_keys import MIN_KEY_LENGTH, read_text
from gimbal_jax.serving.rpc.listen import check_free

STOP_S = 5.0
"""Time for the gateway to end by itself after SIGTERM."""
FOR_EVER_S = 10 * 365 * 86400
_KEY = re.compile(r"[A-Za-z0-9\-._~+/]+=*")  # what a bearer token can be (RFC 6750)
_NAME = re.compile(r"[A-Za-z0-9\-._]+")


@dataclass(frozen=True)
class GatewayConfig:
    """What HTTP clients get."""

    model: Path
    """Folder with the tokenizer and its chat template."""
    port: int
    host: str = "127.0.0.1"
    keys: tuple[tuple[str, str], ...] = ()
    """(name, bearer token) of each client; without any, every client may call."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call; ``*`` for all."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    max_payload_mib: int = 16
    max_requests: int = 1024
    """Most requests at once; one more is answered 429."""
    traces_endpoint: str | None = None
    """HOST:PORT of an OpenTelemetry collector (OTLP over gRPC)."""


def load_http_keys(path: Path) -> tuple[tuple[str, str], ...]:
    """(name, key) of each ``KEY [NAME]`` line; ``#`` starts a comment. Raises ValueError that never tells a key."""
    keys: dict[str, str] = {}
    for number, line in enumerate(read_text("http_api_key_file", path).splitlines(), 1):
        if not (words := line.partition("#")[0].split()):
            continue
        where = f"http_api_key_file {path}, line {number}"
        if len(words) > 2:
            raise ValueError(f"{where}: must be KEY [NAME]; the gateway knows no expiry")
        key, name = (*words, f"key-{number}")[:2]
        if len(key) < MIN_KEY_LENGTH or not _KEY.fullmatch(key):
            raise ValueError(f"{where}: a key is at least {MIN_KEY_LENGTH} letters, digits and -._~+/ (= at the end)")
        if not _NAME.fullmatch(name):
            raise ValueError(f"{where}: a name is letters, digits and -._")
        if key in keys.values() or name in keys:
            raise ValueError(f"{where}: the key or its name stands in the file twice")
        keys[name] = key
    if not keys:
        raise ValueError(f"http_api_key_file {path}: holds no key")
    return tuple(keys.items())


def check_gateway(config: GatewayConfig) -> None:
    """Raises ValueError or OSError that says why a gateway could not start; loads smg, without starting it."""
    if importlib.util.find_spec("smg") is None:
        raise ValueError("--http-port needs the smg gateway: pip install 'gimbal-jax[gateway]'")
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


def gateway_arguments(config: GatewayConfig, grpc_port: int, metrics_port: int, control_key: str) -> list[str]:
    """smg's arguments. ``control_key`` is for nobody: its own administration could send requests elsewhere."""
    arguments: dict[str, list[Any]] = {
        "--host": [config.host],
        "--port": [config.port],
        "--worker-urls": [f"grpc://127.0.0.1:{grpc_port}"],
        "--backend": ["vllm"],
        "--model-path": [config.model],
        # There is one worker: nothing to choose, and none to spare when it is slow or full.
        "--policy": ["passthrough"],
        "--disable-circuit-breaker": [],
        "--disable-worker-overload-protection": [],
        "--disable-load-monitoring": [],
        "--worker-wedge-secs": [FOR_EVER_S],
        "--worker-startup-timeout-secs": [FOR_EVER_S],
        "--worker-startup-check-interval": [1],
        "--shutdown-grace-period-secs": [round(STOP_S)],
        "--max-payload-size": [config.max_payload_mib * 2**20],
        "--max-concurrent-requests": [config.max_requests],
        "--queue-size": [0],
        "--control-plane-api-keys": [f"gimbal:gimbal:admin:{control_key}"],
        # It cannot be turned off.
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
        # Its spans are made at this level only.
        arguments |= {"--enable-trace": [], "--otlp-traces-endpoint": [config.traces_endpoint], "--log-level": ["info"]}
    words = [word for flag, values in arguments.items() for word in (flag, *map(str, values))]
    return words + [word for name, key in config.keys for word in ("--tenant-api-key", f"{name}:{key}")]
