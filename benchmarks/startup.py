"""Measure how long ``gimbal serve`` takes to start, stage by stage: the first start, which compiles, and later ones.

A line of the server's log ends each stage: the size of its KV cache ends imports and checks, its address ends weights,
and "serving" ends programs. CPU seconds are the sum over all threads. They are more reliable than wall-clock seconds
if other processes use the cores.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from gimbal_jax.bench.server_process import cpu_seconds

STAGES = {"KV cache": "imports", "listening": "weights", "serving": "programs"}
"""Prefix of a log line -> the stage that the line ends."""


def one_start(command: list[str]) -> dict[str, float]:
    """Start a server and stop it as soon as it serves. Raises RuntimeError if the server ends before.

    Returns:
        Seconds of each stage, of the whole start ("all"), and CPU seconds ("cpu", if known).
    """
    begin = last = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    took: dict[str, float] = {}
    for line in process.stderr:
        stage = next((stage for start, stage in STAGES.items() if line.startswith(start)), None)
        if stage is not None:
            now = time.monotonic()
            took[stage], last = now - last, now
        if stage == "programs":
            cpu = cpu_seconds(process.pid)
            took |= {"all": last - begin} | ({} if cpu is None else {"cpu": cpu})
            process.send_signal(signal.SIGTERM)
    if process.wait() != 0 or "all" not in took:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode} before it served")
    return took


def main(
    model: Annotated[Path, typer.Argument(help="Checkpoint folder.")],
    options: Annotated[list[str] | None, typer.Argument(help="Options of `gimbal serve`, after `--`.")] = None,
    firsts: Annotated[int, typer.Option(min=1, help="Number of first starts.")] = 1,
    laters: Annotated[int, typer.Option(min=1, help="Number of later starts after each first start.")] = 5,
) -> None:
    """Print the median seconds of first and later starts as JSON."""
    first, later = [], []
    for _ in range(firsts):
        with tempfile.TemporaryDirectory() as cache:
            serve = [str(Path(sys.executable).with_name("gimbal")), "serve", str(model), "--port", "0"]
            command = [*serve, "--compile-cache", cache, *(options or [])]
            first.append(one_start(command))
            later += [one_start(command) for _ in range(laters)]
    medians = {
        name: {stage: round(statistics.median(start[stage] for start in starts), 2) for stage in starts[0]}
        for name, starts in (("first", first), ("later", later))
    }
    print(json.dumps(medians | {"starts": {"first": len(first), "later": len(later)}}, indent=1))


if __name__ == "__main__":
    typer.run(main)
