"""Start an OpenAI-compatible server from a command line, and put the load of ``vllm bench serve`` on it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from gimbal_jax.serving.network.ports import free_port

START_TIMEOUT_S, STOP_TIMEOUT_S, LOAD_TIMEOUT_S, ANSWER_TIMEOUT_S = 600.0, 30.0, 1800.0, 120.0


@dataclass(frozen=True)
class Load:
    """One run of the load generator: its dataset, its rate, and the length of each answer."""

    dataset: tuple[str, ...]
    """Options of the generator that choose the prompts."""
    rate: float
    """Requests per second with Poisson arrivals; infinity sends all requests immediately."""
    output_tokens: tuple[int, ...]
    """Output tokens of each request, in the order of the generator's records."""
    seed: int


@dataclass(frozen=True)
class Result:
    """Results of one run of the load generator; times in milliseconds."""

    tokens_per_s: float
    requests_per_s: float
    ttft_mean: float
    ttft_p99: float
    tpot_mean: float
    tpot_p99: float
    e2e_mean: float
    foreign_cpu: float
    """Share of the host's CPU time that neither the server nor the generator used."""


@contextlib.contextmanager
def serving(command: Sequence[str], model: str, log: Path) -> Iterator[tuple[int, int]]:
    """Start a server, with {port} filled in, and yield (port, process id) once it answers for this model.

    On exit its whole process group is stopped. Raises SystemExit if the server ends early or does not answer in time.
    """
    port = free_port()
    with log.open("w") as output:
        words = [word.replace("{port}", str(port)) for word in command]
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _wait_for_answer(process, port, model, log)
        yield port, process.pid
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):  # SIGKILL also ends children that outlive their parent
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)


def _wait_for_answer(process: subprocess.Popen[bytes], port: int, model: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}).encode()
    url, headers = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
    while process.poll() is None and time.monotonic() < deadline:
        # A refused connection or an HTTP error means that the server is not ready yet.
        with contextlib.suppress(OSError, HTTPException):
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=ANSWER_TIMEOUT_S) as answer:
                answer.read()
            return
        time.sleep(0.25)
    raise SystemExit(f"the server does not answer (exit code {process.poll()}):\n{log.read_text()[-2000:]}")


def generator_command(loadgen: str, tokenizer: Path, port: int, model: str, load: Load, out: Path) -> list[str]:
    """Return the ``vllm bench serve`` command for this load, which writes its records to ``out``."""
    options = {
        "backend": "openai",
        "base-url": f"http://127.0.0.1:{port}",
        "endpoint": "/v1/completions",
        "model": model,
        "tokenizer": str(tokenizer),
        "num-prompts": str(len(load.output_tokens)),
        "request-rate": f"{load.rate:g}",
        "seed": str(load.seed),
        "temperature": "0",
        "result-dir": str(out.parent),
        "result-filename": out.name,
    }
    named = [word for name, value in options.items() for word in (f"--{name}", value)]
    return [
        loadgen,
        "bench",
        "serve",
        *named,
        *load.dataset,
        "--ignore-eos",
        "--disable-tqdm",
        "--save-result",
        "--save-detailed",
    ]


def put_load(loadgen: str, tokenizer: Path, port: int, model: str, load: Load, server: int) -> Result:
    """Run the generator against the server whose process group is ``server``.

    Raises SystemExit if the generator or one of its requests fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        command = generator_command(loadgen, tokenizer, port, model, load, out)
        began, busy, own = time.monotonic(), _machine_cpu_s(), _own_cpu_s(server)
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_TIMEOUT_S, check=False)
        seconds, busy, own = time.monotonic() - began, _machine_cpu_s() - busy, _own_cpu_s(server) - own
        if done.returncode or not out.exists():
            raise SystemExit(f"the load generator failed:\n{(done.stdout + done.stderr)[-3000:]}")
        records = json.loads(out.read_text())
    return result_of(records, load, max(0.0, busy - own) / (seconds * (os.cpu_count() or 1)))


def result_of(records: dict[str, Any], load: Load, foreign_cpu: float) -> Result:
    """Return the result of the generator's records. Raises SystemExit if a request failed.

    Token counts are those of the load, because the generator may count tokens from the text of the answers.
    """
    if failed := [error for error in records["errors"] if error]:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0][-500:]}")
    ttft = np.array(records["ttfts"])
    answering = np.array([sum(gaps) for gaps in records["itls"]])
    tokens = np.array(load.output_tokens)
    several = tokens > 1
    tpot = answering[several] / (tokens[several] - 1)
    return Result(
        tokens_per_s=float(tokens.sum() / records["duration"]),
        requests_per_s=len(tokens) / records["duration"],
        ttft_mean=1e3 * float(ttft.mean()),
        ttft_p99=1e3 * float(np.percentile(ttft, 99)),
        tpot_mean=1e3 * float(tpot.mean()),
        tpot_p99=1e3 * float(np.percentile(tpot, 99)),
        e2e_mean=1e3 * float((ttft + answering).mean()),
        foreign_cpu=foreign_cpu,
    )


def _machine_cpu_s() -> float:
    """Return the CPU seconds that the whole host used since its start."""
    user, nice, system, _idle, _iowait, *interrupts = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    )
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def _own_cpu_s(session: int) -> float:
    """Return the CPU seconds of this process, its children that ended, and all processes of a session."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK") + sum(os.times()[:4])
