"""Ours against any OpenAI-compatible servers: the same checkpoint, the same load, one server at a time, several rounds.

The load is the public generator's, ``vllm bench serve``. In each round every server is started, warmed up, measured
under all loads and stopped, in an order that rotates by round; ratios are taken within a round. Two arrivals:
``offline`` (all requests at once) and ``online`` (Poisson at one rate for all servers). Three kinds of lengths:
``fixed``; ``shared``, where three quarters of each prompt are the same for all; ``mixed``, as in the shipped
conversation trace, scaled to the same means. No prompt comes twice to a server, but for that prefix.

A peer's command says {port} where its port belongs, as in ``--peer 'NAME=env A=1 CMD --port {port}'``. It serves the
model as ``m``, or as it is told: ``NAME:MODEL=CMD``. A program that computes in process, as a batch that is known in
advance, is given as ``--static 'NAME=CMD'``: it prints its speed as "N tok/s", and is compared with fixed-offline.
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
"""Mixed lengths are at most so many times their mean."""

console = Console(width=140)


@dataclass(frozen=True)
class Server:
    """A server to measure."""

    name: str
    model: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Bench:
    """What all rounds have in common."""

    model: Path
    loadgen: str
    folder: Path
    """For logs and prompts."""
    input_len: int
    output_len: int
    offline: int
    """Requests."""
    online: int


Round = dict[str, dict[str, float]]
"""By server, by name of what was measured."""


def server_of(text: str) -> Server:
    """From NAME=COMMAND or NAME:MODEL=COMMAND."""
    name, equals, command = text.partition("=")
    name, _, model = name.partition(":")
    if not (name and equals and command) or name == OURS:
        raise typer.BadParameter(f"{text!r}: must be NAME=COMMAND or NAME:MODEL=COMMAND, NAME not {OURS}")
    return Server(name, model or "m", tuple(shlex.split(command)))


def load_of(bench: Bench, lengths: Lengths, count: int, rate: float, seed: int) -> Load:
    """A run of so many requests; all seeds give other prompts."""
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
    """A line for each request, of random words; returns how many tokens each shall get."""
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
    """Words that are a token each, with the space before them, so that a text of n of them has n tokens."""
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise SystemExit(f"{model} has no tokenizer")
    texts = ((token, tokenizer.decode([token])) for token in range(10_000))
    words = [
        text for token, text in texts if text[:1] == " " and text[1:].isalpha() and tokenizer.encode(text) == [token]
    ]
    if not words:
        raise SystemExit(f"{model}: no word is a token of its tokenizer, so there are no mixed lengths")
    return words


def scaled(length_N: np.ndarray, mean: int) -> np.ndarray:
    """Lengths with about this mean, at least 1 and at most ``LONGEST`` times it."""
    return np.clip(np.round(length_N * (mean / length_N.mean())), 1, LONGEST * mean).astype(int)


def static_speed(command: Sequence[str]) -> float:
    """Tokens per second that the program says."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_TIMEOUT_S, check=False)
    found = re.search(r"([\d.]+) tok/s", done.stdout)
    if done.returncode or found is None:
        raise SystemExit(f"{shlex.join(command)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return float(found[1])


def spread(values: Sequence[float]) -> str:
    """Least, median and most; empty if there are none."""
    if not values:
        return ""
    return " ".join(
        f"{value:.3g}" if value < 100 else f"{value:.0f}" for value in (min(values), median(values), max(values))
    )


def figures(rounds: Sequence[Round], measure: str, server: str, other: str | None = None) -> list[float]:
    """Of a server in each round that has it, or its ratio to another's in the same round."""
    names = [server] if other is None else [server, other]
    found = [[one[name][measure] for name in names] for one in rounds if all(measure in one.get(n, {}) for n in names)]
    return [values[0] if other is None else values[0] / values[1] for values in found]


def table_of(load: str, rounds: Sequence[Round]) -> Table:
    """Each server's own figures, then ours over each other's, paired by round."""
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
    """One server's turn in a round: by load, by name of what was measured. All servers get the same prompts in it.

    A peer that fails loses the rest of its turn, but in round 0, by which the rates are chosen.
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

        put("fixed", bench.offline, inf, 0)  # warms up
        for seed, (lengths, arrivals) in enumerate(loads, start=1):
            offline = arrivals == "offline"
            count, rate = (bench.offline, inf) if offline else (bench.online, rates[lengths])
            result = results[f"{lengths}-{arrivals}"] = put(lengths, count, rate, seed)
            say(number, f"{lengths}-{arrivals}", server.name, result)


def say(number: int, load: str, name: str, result: Mapping[str, float]) -> None:
    figures = ", ".join(f"{measure} {value:.3g}" for measure, value in result.items())
    console.print(f"round {number} {load} {name}: {figures}", soft_wrap=True)


def main(
    model: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Checkpoint that all serve.")],
    loadgen: Annotated[str, typer.Option(help="Path of the vllm command that has `bench serve`.")],
    peer: Annotated[list[str] | None, typer.Option(help="NAME=COMMAND of another server; once for each.")] = None,
    static: Annotated[list[str] | None, typer.Option(help="NAME=COMMAND of a program that prints `N tok/s`.")] = None,
    serve_options: Annotated[str, typer.Option(help="Options for our own server.")] = "",
    lengths: Annotated[str, typer.Option(help="Which lengths, with commas.")] = ",".join(get_args(Lengths)),
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    input_len: Annotated[int, typer.Option(min=4)] = 128,
    output_len: Annotated[int, typer.Option(min=2)] = 64,
    requests: Annotated[int, typer.Option(min=1, help="Requests offline.")] = 32,
    online_requests: Annotated[int, typer.Option(min=1)] = 48,
    rate: Annotated[float | None, typer.Option(min=0.01, help="Requests per second online, for all lengths.")] = None,
    share: Annotated[
        float, typer.Option(min=0.01, help="Or this share of the slowest server's own offline rate, measured first.")
    ] = 0.7,
    out: Annotated[Path, typer.Option(help="All rounds, as JSON.")] = OUT / "bench_peers.json",
) -> None:
    """Print a table for each load."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever stops this stops its server too
    chosen = [kind for kind in get_args(Lengths) if kind in lengths.split(",")]
    if len(chosen) != len(lengths.split(",")):
        raise typer.BadParameter(f"--lengths {lengths}: must be some of {','.join(get_args(Lengths))}")
    if static and "fixed" not in chosen:
        raise typer.BadParameter("--static is compared with the fixed lengths: --lengths must have them")
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
