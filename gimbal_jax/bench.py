"""What ``gimbal bench`` measures, from the server's start to its end, and what it prints."""

from __future__ import annotations

import asyncio
import contextlib
import math
import shlex
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from rich.console import Console

from gimbal_jax.serving.bench_load import LoadConfig, lengths_of
from gimbal_jax.serving.bench_report import last_profiles, latency_table, profile_table, rate_table
from gimbal_jax.serving.bench_rounds import Rate, Round, Surface, grpc_surface, http_surface, measure
from gimbal_jax.serving.client import GimbalClient
from gimbal_jax.serving.client_records import ClientError
from gimbal_jax.serving.replay import SendFailed
from gimbal_jax.serving.server_process import free_port, peak_rss_bytes, running_server
from gimbal_jax.terminal import console, print_table, progress_bar


@dataclass(frozen=True)
class Place:
    """The server: one that runs, by gRPC or HTTP, or one of our own. Raises ValueError that names the flag."""

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
    """What was measured where, and the most memory that a server of our own had.

    Raises ValueError or OSError for what the user can mend, ConnectionError where the server does not answer.
    """
    if profile and place.url is not None:
        raise ValueError("--profile needs gRPC: give --target or a MODEL instead of --url")
    lengths_of(load)  # what is wrong with a trace is said before a server starts

    async def run() -> tuple[Surface, list[Round], int | None]:
        async with open_surface(place) as surface:
            with progress_bar("requests") as progress:
                rounds = await measure(surface, load, rate, profile=profile, progress=progress)
            return surface, rounds, None if surface.pid is None else peak_rss_bytes(surface.pid)

    try:
        return asyncio.run(run())
    except (ClientError, SendFailed) as error:
        raise ConnectionError(f"{place.target or place.url or place.model}: {error}") from error


@contextlib.asynccontextmanager
async def open_surface(place: Place) -> AsyncIterator[Surface]:
    """That of a running server, or of our own, which stops at the end."""
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
    """Tables and facts on stdout, errors on stderr."""
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
