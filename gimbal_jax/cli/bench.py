"""The ``gimbal bench`` command: from its options to a measured server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shlex
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from gimbal_jax.bench.load import LoadConfig, lengths_of
from gimbal_jax.bench.replay import SendFailed
from gimbal_jax.bench.report import last_profiles, latency_table, profile_table, rate_table
from gimbal_jax.bench.rounds import Rate, Round, Surface, grpc_surface, http_surface, measure
from gimbal_jax.bench.server_process import peak_rss_bytes, running_server
from gimbal_jax.cli.terminal import console, print_table, progress_bar, report_errors
from gimbal_jax.client.client import GimbalClient
from gimbal_jax.client.records import ClientError
from gimbal_jax.serving.network.ports import free_port
from gimbal_jax.version import __version__


def bench(
    model: Annotated[
        str | None, typer.Argument(help="Folder or hub id of a model to serve here, measure and stop.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="HOST:PORT of a running server, to measure gRPC.")] = None,
    url: Annotated[
        str | None, typer.Option(help="http://HOST:PORT of a running server, to measure OpenAI's /v1/completions.")
    ] = None,
    surface: Annotated[Literal["grpc", "http"], typer.Option(help="Surface of MODEL's server to measure.")] = "grpc",
    serve_option: Annotated[
        list[str] | None, typer.Option(help='Options of `gimbal serve` for MODEL, such as "--dp 2 --tp 2".')
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="With --url: tokenizer.json of the server's model, to make prompts of known length."),
    ] = None,
    load: Annotated[
        Literal["offline", "online"], typer.Option(help="offline: all requests at once. online: Poisson arrivals.")
    ] = "offline",
    rate: Annotated[float | None, typer.Option(help="Requests per second of an online load.")] = None,
    share: Annotated[
        float | None,
        typer.Option(help="Online rate as a share of the rate that the offline rounds before reached; default 0.7."),
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests of a round.")] = 32,
    input_len: Annotated[int | None, typer.Option(help="Prompt tokens; with a trace their mean. Default 128.")] = None,
    output_len: Annotated[int | None, typer.Option(help="Output tokens; with a trace their mean. Default 64.")] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            help="Lengths of the requests of a CSV file (input_tokens, output_tokens; not scaled unless a mean is "
            "given), or of `sharegpt-like`: real conversations, scaled to the means.",
            metavar="FILE|sharegpt-like",
        ),
    ] = None,
    shared_prefix: Annotated[
        float, typer.Option(help="Share of each prompt that is a prefix common to all, such as 0.75; default none.")
    ] = 0.0,
    rounds: Annotated[int, typer.Option(help="Rounds to take the median of.")] = 3,
    warmup: Annotated[int, typer.Option(help="Offline warm-up rounds, which are not counted.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of prompts and arrivals.")] = 0,
    profile: Annotated[
        bool, typer.Option("--profile", help="Show the host's time in the parts of a step; not with --url.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all measurements to this file.")] = None,
) -> None:
    """Measure a server through its gRPC or HTTP surface: latencies of clients, and throughput."""
    with report_errors():
        from gimbal_jax.bench.load import LoadConfig
        from gimbal_jax.bench.report import bench_record
        from gimbal_jax.bench.rounds import rate_of

        place = Place(model, target, url, surface, tuple(serve_option or ()), tokenizer)
        config = LoadConfig(requests, input_len, output_len, trace, shared_prefix, rounds, warmup, seed)
        arrivals = rate_of(load, rate, share)
        if json_file is not None:
            json_file.touch()  # an error here costs less than after the measurement
        where, measured, peak = run_bench(place, config, arrivals, profile=profile)
        show(where, measured, peak)
        if json_file is not None:
            json_file.write_text(json.dumps(bench_record(where, config, measured, peak, __version__), indent=1))
    raise typer.Exit(any(r.summary.failed for r in measured))


@dataclass(frozen=True)
class Place:
    """The server to measure: a running one, by gRPC or HTTP, or our own. Raises ValueError that names the flag."""

    model: str | None = None
    target: str | None = None
    url: str | None = None
    surface: Literal["grpc", "http"] = "grpc"
    serve_option: tuple[str, ...] = ()
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        if sum(name is not None for name in (self.model, self.target, self.url)) != 1:
            raise ValueError("give one of MODEL, --target and --url")
        if (self.serve_option or self.surface == "http") and self.model is None:
            raise ValueError("--serve-option and --surface are for a MODEL that is served here")
        if (self.tokenizer is None) == (self.url is not None):
            raise ValueError("--tokenizer goes with --url, which needs it: prompts are text of known length")


def run_bench(
    place: Place, load: LoadConfig, rate: Rate | None, *, profile: bool
) -> tuple[Surface, list[Round], int | None]:
    """Return the surface, the measured rounds, and the peak memory of our own server in bytes (None for another).

    Raises ValueError or OSError for errors that the user can correct, ConnectionError if the server does not answer.
    """
    if profile and place.url is not None:
        raise ValueError("--profile needs gRPC: give --target or a MODEL instead of --url")
    lengths_of(load)  # errors in a trace are reported before a server starts

    async def run() -> tuple[Surface, list[Round], int | None]:
        async with open_surface(place) as surface:
            with progress_bar("requests") as progress:
                rounds = await measure(surface, load, rate, profile=profile, progress=progress)
            return surface, rounds, None if surface.pid is None else peak_rss_bytes(surface.pid)

    try:
        return asyncio.run(run())
    except (ClientError, SendFailed) as error:
        hint = ""
        if place.url is not None and isinstance(error.__cause__, ConnectionRefusedError):
            hint = ". A server that is warming up does not answer HTTP yet: wait until it prints `serving`"
        raise ConnectionError(f"{place.target or place.url or place.model}: {error}{hint}") from error


@contextlib.asynccontextmanager
async def open_surface(place: Place) -> AsyncIterator[Surface]:
    """Yield the surface of a running server, or of our own server, which stops at the end."""
    if place.target is not None:
        async with grpc_surface(place.target) as surface:
            yield surface
    elif place.url is not None:
        assert place.tokenizer is not None
        yield await http_surface(place.url, place.tokenizer.read_text("utf-8"))
    else:
        async with contextlib.AsyncExitStack() as stack:
            with console.status("starting the server"):
                surface = await _own_server(place, stack)
            yield surface


async def _own_server(place: Place, stack: contextlib.AsyncExitStack) -> Surface:
    assert place.model is not None
    options = [word for option in place.serve_option for word in shlex.split(option)]
    port = free_port()
    if place.surface == "http":
        options += "--http-port", str(port)
    log = Path(stack.enter_context(tempfile.TemporaryDirectory()), "log")
    server = await stack.enter_async_context(running_server(place.model, options, log, math.inf))
    if place.surface == "grpc":
        return await stack.enter_async_context(grpc_surface(server.target, server.pid))
    client = await stack.enter_async_context(GimbalClient(server.target))
    return await http_surface(f"http://127.0.0.1:{port}", (await client.tokenizer()).json, server.pid)


def show(surface: Surface, rounds: Sequence[Round], peak: int | None) -> None:
    """Print tables and facts on stdout, and errors of requests on stderr."""
    out = Console()
    print_table(rate_table(rounds))
    print_table(latency_table(rounds))
    for kind, phases in last_profiles(rounds).items():
        print_table(profile_table(kind, phases))
    say = partial(out.print, markup=False, highlight=False, soft_wrap=True)
    say(f"{surface.name} {surface.address}, model {surface.model}; prompts: {surface.prompts}")
    for rate in sorted({r.rate for r in rounds if r.rate is not None}):
        say(f"online: {rate:.3f} requests/s")
    if peak is not None:
        say(f"peak RSS of the server: {peak / 2**20:,.0f} MiB")
    for error in sorted({error for r in rounds for error in r.errors}):
        console.print(f"failed: {error}")
