"""Every option of ``gimbal serve`` in one record: its fields are the flags and the keys of the configuration file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import typer

from gimbal_jax.cli.serve.policy_tables import TABLES, kind_of
from gimbal_jax.config import (
    GPU_ENGINE,
    MEMORY_UTILISATION,
    DispatchConfig,
    EngineConfig,
    Exchange,
    NetworkConfig,
    PlacementConfig,
    QueueConfig,
)

DEFAULT_MODEL_LEN = 4096
DEVICES_HELP = "`auto`, `gpu`, `cpu`, or `cpu:N` for N virtual CPU devices."
DTYPE_HELP = (
    "Type of weights, hidden states and KV cache; auto is float32 on CPU and the checkpoint's own elsewhere. "
    "A CPU that computes in float32 keeps weights stored in bfloat16 in that type, if that is faster."
)

_model, _mesh, _processes, _engine, _scheduling, _network, _access, _http, _operation = (
    partial(typer.Option, rich_help_panel=panel)
    for panel in (
        "Model",
        "Mesh and devices",
        "Several nodes",
        "Engine",
        "Scheduling",
        "Network",
        "Access",
        "OpenAI's HTTP API",
        "Operation",
    )
)


def _by_device(limit: str) -> str:
    """Describe the default of an engine's limit."""
    return f"default {getattr(EngineConfig, limit)} on CPU, {getattr(GPU_ENGINE, limit)} on GPU"


@dataclass(frozen=True)
class ServeOptions:
    """Values of the user, or the defaults. Flag and key of a field are its name with dashes."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Checkpoint folder (Hugging Face safetensors, or Orbax from `convert`), or a hub id."
        ),
    ] = None
    revision: Annotated[str | None, _model(help="Branch, tag or commit of a hub id; default its main branch.")] = None
    served_model_name: Annotated[
        str | None, _model(help="The model's name for clients; default the folder's, or the hub id.")
    ] = None
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], _model(help=DTYPE_HELP)] = "auto"

    dp: Annotated[int, _mesh(min=1, help="DP engines.")] = 1
    tp: Annotated[int, _mesh(min=1, help="Devices of each engine; experts are spread over all dp * tp.")] = 1
    devices: Annotated[str, _mesh(help=DEVICES_HELP)] = "auto"
    exchange: Annotated[Exchange, _mesh(help="How tokens travel to experts.")] = EngineConfig.exchange
    memory_utilisation: Annotated[
        float, _mesh(min=0.1, max=1, help="Share of each GPU's memory that the server takes.")
    ] = MEMORY_UTILISATION
    compile_cache: Annotated[str, _mesh(help="Folder that keeps compiled programs for the next start, or `off`.")] = (
        "~/.cache/gimbal_jax"
    )

    coordinator: Annotated[
        str | None,
        _processes(
            help="HOST:PORT of process 0 for jax.distributed, or `auto` under SLURM, Open MPI and Kubernetes, "
            "in which jax finds it and the next two by itself."
        ),
    ] = None
    processes: Annotated[int | None, _processes(min=1, help="Processes that serve together, one or more a node.")] = (
        None
    )
    process: Annotated[int | None, _processes(min=0, help="Number of this process; 0 leads and takes requests.")] = None
    secret_file: Annotated[
        Path | None, _processes(help="File with a secret that all processes share, at least 16 characters.")
    ] = None
    command_port: Annotated[
        int | None,
        _processes(
            min=1, max=65535, help="Port of process 0 for its commands; default the one after the coordinator's."
        ),
    ] = None
    command_cert: Annotated[
        Path | None, _processes(help="PEM file of the only certificate that followers accept: commands use TLS.")
    ] = None
    command_key: Annotated[Path | None, _processes(help="PEM file of its private key; process 0 needs it.")] = None
    trusted_network: Annotated[
        Literal["on", "off"],
        _processes(help="Allow commands without TLS between hosts: only on a network where every host is trusted."),
    ] = "off"

    max_model_len: Annotated[
        int | None, _engine(min=2, help=f"Most tokens per sequence; default {DEFAULT_MODEL_LEN} or the model's.")
    ] = None
    max_rows: Annotated[
        int | None, _engine(min=1, help=f"Most sequences per engine at once; {_by_device('max_rows')}.")
    ] = None
    token_budget: Annotated[
        int | None, _engine(min=1, help=f"Most tokens per engine and step; {_by_device('token_budget')}.")
    ] = None
    tile: Annotated[int | None, _engine(min=2, help=f"Tokens per prefill tile; {_by_device('tile')}.")] = None
    page_size: Annotated[int | None, _engine(min=1, help=f"Tokens per KV page; {_by_device('page_size')}.")] = None
    num_pages: Annotated[
        int | None,
        _engine(min=1, help=f"KV pages per engine; default as many as a GPU holds, {EngineConfig.num_pages} on CPU."),
    ] = None
    max_queue: Annotated[int, _engine(min=1, help="Most waiting requests per engine; one more is rejected.")] = (
        EngineConfig.max_queue
    )
    prefix_cache: Annotated[
        Literal["on", "off"], _engine(help="Whether requests share the KV pages of common prefixes.")
    ] = "on"

    # Tables of the configuration file; ``policy_tables`` names the fields that have flags.
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    placement_file: Annotated[
        Path | None, _scheduling(help="Start from this .npz file's placement, or its last window's.")
    ] = None
    placement_state: Annotated[
        Path | None,
        _scheduling(
            help="Start from this .npz file's placement if it is there, and keep it up to date with every change."
        ),
    ] = None
    dump_counts: Annotated[Path | None, _scheduling(help="Folder to write every traffic window to.")] = None
    save: Annotated[
        Path | None, _scheduling(help="At the end, write an Orbax checkpoint here, with the placement learned.")
    ] = None

    host: Annotated[str, _network(help="Address to listen on for gRPC.")] = NetworkConfig.host
    port: Annotated[int, _network(min=0, max=65535, help="gRPC port; 0 takes a free one.")] = NetworkConfig.port
    tls_cert: Annotated[
        Path | None, _network(help="PEM file of the server's certificate and its chain: TLS only, gRPC and HTTP.")
    ] = None
    tls_key: Annotated[Path | None, _network(help="PEM file of its private key.")] = None
    tls_client_ca: Annotated[
        Path | None, _access(help="PEM file of authorities: only clients with a certificate of theirs (mutual TLS).")
    ] = None
    api_keys: Annotated[
        Path | None, _access(help="File of keys, a line `KEY [NAME] [EXPIRES]` each: gRPC clients need one of them.")
    ] = None
    max_message_mib: Annotated[int, _access(min=1, help="Longest message or HTTP body of a client, in MiB.")] = (
        NetworkConfig.max_message_mib
    )
    max_streams_per_client: Annotated[int, _access(min=1, help="Most requests of one gRPC client at once.")] = (
        NetworkConfig.max_streams_per_client
    )

    http_port: Annotated[
        int | None, _http(min=1, max=65535, help="Port of OpenAI's API, by the smg gateway; off without it.")
    ] = None
    http_host: Annotated[str, _http(help="Address to listen on for it.")] = "127.0.0.1"
    http_api_key_file: Annotated[
        Path | None, _http(help="File of keys, a line `KEY [NAME]` each: HTTP clients need one of them.")
    ] = None
    cors_origin: Annotated[
        tuple[str, ...], _http(help="Origin whose pages may call, `*` for all; give it once for each.")
    ] = ()
    tool_call_parser: Annotated[
        str | None, _http(help="How the gateway reads tool calls in answers, as `qwen`; default by the model's name.")
    ] = None
    reasoning_parser: Annotated[
        str | None, _http(help="How it reads reasoning in answers, as `qwen3`; default by the model's name.")
    ] = None

    operators_port: Annotated[
        int | None,
        _operation(min=0, max=65535, help="Port of /metrics, /health, /ready and /dashboard; off without it."),
    ] = None
    operators_host: Annotated[str, _operation(help="Address to listen on for them; they ask for no key.")] = "127.0.0.1"
    log_format: Annotated[
        Literal["text", "json", "off"], _operation(help="Form of the line on stdout for each request that ended.")
    ] = "text"
    otlp_traces_endpoint: Annotated[
        str | None,
        _operation(help="http://HOST:PORT of an OTLP collector (gRPC), which gets a span per request."),
    ] = None
    profile_dir: Annotated[
        Path | None, _operation(help="Folder for profiles that StartProfile asks for; without it they are rejected.")
    ] = None
    drain_timeout: Annotated[float, _operation(min=0, help="Seconds that running requests get after SIGTERM.")] = 30.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{key_of(name)} {value}: must be a finite number")


def key_of(name: str) -> str:
    """Return the key of a field in a configuration file, which is its flag without the leading dashes."""
    return name.replace("_", "-")


def hints() -> dict[str, Any]:
    """Return Annotated[type, typer's flag] of each field that is not a table, by name."""
    every = get_type_hints(ServeOptions, include_extras=True)
    return {name: hint for name, hint in every.items() if get_origin(hint) is Annotated}


def policy_hints() -> dict[str, Any]:
    """Return Annotated[type, typer's flag] of each flag for a field of a table, by the flag's name."""
    return {
        setting.flag: Annotated[
            kind_of(table, field), _scheduling(help=setting.help, min=setting.low, max=setting.high)
        ]
        for table, settings in TABLES.items()
        for field, setting in settings.items()
        if setting.flag is not None
    }
