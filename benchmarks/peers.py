"""Compare gimbal serve with other OpenAI-compatible servers: the same checkpoint and load, in several rounds.

``vllm bench serve`` generates the load. In each round every server is started, warmed up, measured under all loads and
stopped, one server at a time. The order of the servers rotates by round, and ratios are taken within a round.

There are two kinds of arrivals and three kinds of lengths. No prompt is sent twice to a server, except the shared part.

    offline   all requests are sent immediately
    online    Poisson arrivals at one rate for all servers
    fixed     all prompts and all outputs have the same length
    shared    as fixed, and three quarters of each prompt are the same for all requests
    mixed     lengths of the shipped conversation trace, scaled to the same means

``--peer 'NAME=env A=1 CMD --port {port}'`` adds a server, with {port} in place of its port. The server names the model
``m``, or MODEL with ``NAME:MODEL=CMD``. ``--static 'NAME=CMD'`` adds a program that computes one static batch in
process. The program prints its speed as "N tok/s", which is compared with the load fixed-offline.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from math import inf
from pathlib import Path
from statistics import median
from typing import Annotated, Literal, get_args

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.peer_server import LOAD_TIMEOUT_S, Load, Result, put_load, serving
from gimbal_jax.serving.text.tokenizer import load_tokenizer
from gimbal_jax.simulation.workload import length_table

OUT = Path(__file__).resolve().parents[1] / "out"
OURS = "gimbal"
Lengths = Literal["fixed", "shared", "mixed"]
LONGEST = 3
"""Largest mixed length, as a multiple of the mean."""

console = Console(width=140)


@dataclass(frozen=True)
class Server:
    """A server to measure."""

    name: str
    model: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Bench:
    """Parameters that all rounds share."""

    model: Path
    loadgen: str
    folder: Path
    """Folder of logs and prompts."""
    input_len: int
    output_len: int
    offline: int
    """Number of requests with offline arrivals."""
    online: int
    """Number of requests with online arrivals."""


Round = dict[str, dict[str, float]]
"""Values by server and by name of the measure."""


def server_of(text: str) -> Server:
    """Parse NAME=COMMAND or NAME:MODEL=COMMAND. Raises BadParameter for other text."""
    name, equals, command = text.partition("=")
    name, _, model = name.partition(":")
    if not (name and equals and command) or name == OURS:
        raise typer.BadParameter(f"{text!r}: must be NAME=COMMAND or NAME:MODEL=COMMAND, NAME not {OURS}")
    return Server(name, model or "m", tuple(shlex.split(command)))


def load_of(bench: Bench, lengths: Lengths, count: int, rate: float, seed: int) -> Load:
    """Return a run of ``count`` requests. Different seeds give different prompts."""
    if lengths == "mixed":
        path = bench.folder / f"mixed-{seed}.jsonl"
        output_tokens = write_mixed_prompts(bench, count, seed, path)
        options = ("--dataset-name", "custom", "--dataset-path", str(path), "--custom-output-len", "-1")
        return Load((*options, "--skip-chat-template", "--disable-shuffle"), rate, output_tokens, seed)
    shared = bench.input_len * 3 // 4 if lengths == "shared" else 0
    numbers = {"prefix-len": shared, "input-len": bench.input_len - shared, "output-len": bench.output_len}
    words = [word for name, value in numbers.items() for word in (f"--random-{name}", str(value))]
    return Load(("--dataset-name", "random", *words), rate, (bench.output_len,) * count, seed)


def write_mixed_prompts(bench: Bench, count: int, seed: int, path: Path) -> tuple[int, ...]:
    """Write one line of random words for each request, and return the output tokens of each."""
    rng, table = np.random.default_rng(seed), length_table("azure-conv")
    row_N = rng.choice(len(table.input_N), count)
    inputs = scaled(table.input_N, bench.input_len)[row_N].tolist()
    outputs = scaled(table.output_N, bench.output_len)[row_N].tolist()
    words = word_tokens(bench.model)
    with path.open("w") as file:
        for input_tokens, output_tokens in zip(inputs, outputs, strict=True):
            prompt = "".join(rng.choice(words, input_tokens))
            file.write(json.dumps({"prompt": prompt, "output_tokens": output_tokens}) + "\n")
    return tuple(outputs)


@cache
def word_tokens(model: Path) -> list[str]:
    """Return words that are one token each, with the space before them: a text of n such words has n tokens."""
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise SystemExit(f"{model}: has no tokenizer")
    texts = ((token, tokenizer.decode([token])) for token in range(10_000))
    words = [
        text for token, text in texts if text[:1] == " " and text[1:].isalpha() and tokenizer.encode(text) == [token]
    ]
    if not words:
        raise SystemExit(f"{model}: no word is a token of its tokenizer, so there are no mixed lengths")
    return words


def scaled(length_N: np.ndarray, mean: int) -> np.ndarray:
    """Return the lengths scaled to about this mean, at least 1 and at most ``LONGEST`` times the mean."""
    return np.clip(np.round(length_N * (mean / length_N.mean())), 1, LONGEST * mean).astype(int)


def static_speed(command: Sequence[str]) -> float:
    """Run a program and return the tokens per second that it prints. Raises SystemExit if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_TIMEOUT_S, check=False)
    found = re.search(r"([\d.]+) tok/s", done.stdout)
    if done.returncode or found is None:
        raise SystemExit(f"{shlex.join(command)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return float(found[1])


def spread(values: Sequence[float]) -> str:
    """Return minimum, median and maximum as text; empty if there are no values."""
    if not values:
        return ""
    return " ".join(
        f"{value:.3g}" if value < 100 else f"{value:.0f}" for value in (min(values), median(values), max(values))
    )


def figures(rounds: Sequence[Round], measure: str, server: str, other: str | None = None) -> list[float]:
    """Return a measure of a server in each round, or its ratio to another server in the same round.

    Rounds in which a server lacks the measure are left out.
    """
    names = [server] if other is None else [server, other]
    found = [[one[name][measure] for name in names] for one in rounds if all(measure in one.get(n, {}) for n in names)]
    return [values[0] if other is None else values[0] / values[1] for values in found]


def table_of(load: str, rounds: Sequence[Round]) -> Table:
    """Return a table of each server's values, then the ratios of gimbal to each other server, paired by round."""
    measures = [field.name for field in fields(Result)]
    table = Table("server", *measures, title=f"{load}: min median max of {len(rounds)} rounds; times in ms")
    names = list(dict.fromkeys(name for one in rounds for name in one))
    for name in names:
        table.add_row(name, *(spread(figures(rounds, measure, name)) for measure in measures))
    table.add_section()
    for name in names:
        if name != OURS:
            ratios = (figures(rounds, m, OURS, name) if m != "foreign_cpu" else [] for m in measures)
            table.add_row(f"{OURS} / {name}", *map(spread, ratios))
    return table


def measure(
    bench: Bench, server: Server, number: int, loads: Sequence[tuple[Lengths, str]], rates: Mapping[str, float]
) -> Round:
    """Measure one server in one round. Return its values by load and by name of the measure.

    All servers get the same prompts in a round. If a peer fails, the rest of its turn is skipped. A failure of gimbal,
    or in round 0, which sets the online rates, raises SystemExit.
    """
    results: Round = {}
    try:
        _measure(bench, server, number, loads, rates, results)
    except SystemExit as failure:
        if server.name == OURS or number == 0:
            raise
        console.print(f"round {number} {server.name} ends early: {failure}", soft_wrap=True)
    return results


def _measure(
    bench: Bench,
    server: Server,
    number: int,
    loads: Sequence[tuple[Lengths, str]],
    rates: Mapping[str, float],
    results: Round,
) -> None:
    with serving(server.command, server.model, bench.folder / f"{server.name}.log") as (port, pid):

        def put(lengths: Lengths, count: int, rate: float, seed: int) -> dict[str, float]:
            load = load_of(bench, lengths, count, rate, 1000 * number + seed)
            return asdict(put_load(bench.loadgen, bench.model, port, server.model, load, pid))

        put("fixed", bench.offline, inf, 0)  # warm up
        for seed, (lengths, arrivals) in enumerate(loads, start=1):
            offline = arrivals == "offline"
            count, rate = (bench.offline, inf) if offline else (bench.online, rates[lengths])
            result = results[f"{lengths}-{arrivals}"] = put(lengths, count, rate, seed)
            say(number, f"{lengths}-{arrivals}", server.name, result)


def say(number: int, load: str, name: str, result: Mapping[str, float]) -> None:
    figures = ", ".join(f"{measure} {value:.3g}" for measure, value in result.items())
    console.print(f"round {number} {load} {name}: {figures}", soft_wrap=True)


def main(
    model: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Checkpoint that all servers load.")],
    loadgen: Annotated[str, typer.Option(help="Path of the vllm command that has `bench serve`.")],
    peer: Annotated[list[str] | None, typer.Option(help="NAME=COMMAND of another server. Repeatable.")] = None,
    static: Annotated[
        list[str] | None, typer.Option(help="NAME=COMMAND of a program that prints `N tok/s`. Repeatable.")
    ] = None,
    serve_options: Annotated[str, typer.Option(help="Options of gimbal serve.")] = "",
    lengths: Annotated[str, typer.Option(help="Kinds of lengths, separated by commas.")] = ",".join(get_args(Lengths)),
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    input_len: Annotated[int, typer.Option(min=4)] = 128,
    output_len: Annotated[int, typer.Option(min=2)] = 64,
    requests: Annotated[int, typer.Option(min=1, help="Requests of an offline load.")] = 32,
    online_requests: Annotated[int, typer.Option(min=1)] = 48,
    rate: Annotated[float | None, typer.Option(min=0.01, help="Requests per second online, for all lengths.")] = None,
    share: Annotated[
        float,
        typer.Option(min=0.01, help="Without --rate: online rate as a share of the slowest server's offline rate."),
    ] = 0.7,
    out: Annotated[Path, typer.Option(help="JSON file of all rounds.")] = OUT / "bench_peers.json",
) -> None:
    """Measure all servers and print a table for each load."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that its server stops too
    chosen = [kind for kind in get_args(Lengths) if kind in lengths.split(",")]
    if len(chosen) != len(lengths.split(",")):
        raise typer.BadParameter(f"--lengths {lengths}: must be some of {','.join(get_args(Lengths))}")
    if static and "fixed" not in chosen:
        raise typer.BadParameter(f"--lengths {lengths}: must have `fixed`, which --static is compared with")
    gimbal = str(Path(sys.executable).with_name("gimbal"))
    ours = (gimbal, "serve", str(model), "--port", "0", "--http-port", "{port}", "--served-model-name", "m")
    servers = [Server(OURS, "m", (*ours, *shlex.split(serve_options))), *map(server_of, peer or [])]
    programs = [server_of(text) for text in static or []]
    bench = Bench(model, loadgen, out.parent / out.stem, input_len, output_len, requests, online_requests)
    bench.folder.mkdir(parents=True, exist_ok=True)
    offline: list[tuple[Lengths, str]] = [(kind, "offline") for kind in chosen]
    loads = [(kind, arrivals) for kind in chosen for arrivals in ("offline", "online")]
    rates = dict.fromkeys(chosen, rate or 0.0)
    if rate is None:
        found = [measure(bench, server, 0, offline, {}) for server in servers]
        for kind in chosen:
            rates[kind] = share * min(results[f"{kind}-offline"]["requests_per_s"] for results in found)
    console.print("online:", ", ".join(f"{kind} {value:.3g} requests/s" for kind, value in rates.items()))

    measured: dict[str, list[Round]] = {f"{kind}-{arrivals}": [] for kind, arrivals in loads}
    for number in range(1, rounds + 1):
        for one_load in measured.values():
            one_load.append({})
        turn = number % (len(servers) + len(programs))
        for server in [*servers, *programs, *servers, *programs][turn:][: len(servers) + len(programs)]:
            if server in programs:
                results = {"fixed-offline": {"tokens_per_s": static_speed(server.command)}}
                say(number, "fixed-offline", server.name, results["fixed-offline"])
            else:
                results = measure(bench, server, number, loads, rates)
            for load, result in results.items():
                measured[load][-1][server.name] = result
        commands = {server.name: server.command for server in (*servers, *programs)}
        out.write_text(json.dumps({"rates": rates, "commands": commands, "rounds": measured}, indent=1))
    for load, of_load in measured.items():
        console.print(table_of(load, of_load))


if __name__ == "__main__":
    typer.run(main)
