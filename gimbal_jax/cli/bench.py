"""The ``gimbal bench`` command: from its options to a measured server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from gimbal_jax.cli.terminal import errors_said
from gimbal_jax.version import __version__


def bench(
    model: Annotated[str | None, typer.Argument(help="Folder or hub id: serve it here, measure, stop.")] = None,
    target: Annotated[str | None, typer.Option(help="HOST:PORT of a server that runs: measure gRPC.")] = None,
    url: Annotated[str | None, typer.Option(help="http://HOST:PORT of one: measure OpenAI's /v1/completions.")] = None,
    surface: Annotated[Literal["grpc", "http"], typer.Option(help="What to measure of MODEL's server.")] = "grpc",
    serve_option: Annotated[
        list[str] | None, typer.Option(help='Options of `gimbal serve` for MODEL, as "--dp 2 --tp 2".')
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="With --url: tokenizer.json of its model, to make prompts of known length.")
    ] = None,
    load: Annotated[
        Literal["offline", "online"], typer.Option(help="All requests at once, or as they come (Poisson).")
    ] = "offline",
    rate: Annotated[float | None, typer.Option(help="Requests per second of an online load.")] = None,
    share: Annotated[
        float | None,
        typer.Option(help="Or the rate as a share of what offline rounds just before reached; default 0.7."),
    ] = None,
    requests: Annotated[int, typer.Option(help="Of a round.")] = 32,
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
        float, typer.Option(help="Share of each prompt that all have in common, as 0.75; else no two begin alike.")
    ] = 0.0,
    rounds: Annotated[int, typer.Option(help="Rounds to take the median of.")] = 3,
    warmup: Annotated[int, typer.Option(help="Offline rounds before, which are not counted.")] = 1,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    profile: Annotated[
        bool, typer.Option("--profile", help="Show what the host does in a step; not with --url.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")] = None,
) -> None:
    """Measure a server through its gRPC or HTTP surface: latencies as clients see them, and throughput."""
    with errors_said():
        from gimbal_jax.bench.load import LoadConfig
        from gimbal_jax.bench.report import bench_record
        from gimbal_jax.bench.rounds import rate_of
        from gimbal_jax.cli.bench_command import Place, run_bench, show

        place = Place(model, target, url, surface, tuple(serve_option or ()), tokenizer)
        config = LoadConfig(requests, input_len, output_len, trace, shared_prefix, rounds, warmup, seed)
        arrivals = rate_of(load, rate, share)
        if json_file is not None:
            json_file.touch()  # rather than find out at the end
        where, measured, peak = run_bench(place, config, arrivals, profile=profile)
        show(where, measured, peak)
        if json_file is not None:
            json_file.write_text(json.dumps(bench_record(where, config, measured, peak, __version__), indent=1))
    raise typer.Exit(any(r.summary.failed for r in measured))
