"""Processes that a test starts together. It waits for them for a limited time, and they are always gone at the end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gimbal_jax.serving.network.ports import free_port

ROOT = Path(__file__).parents[2]
GRACE_S = 60.0
"""Seconds that the other processes have to end by themselves after one has failed."""


@dataclass(frozen=True)
class Process:
    """A process in its own group, with a file for everything it prints."""

    popen: subprocess.Popen[bytes]
    log: Path

    def output(self) -> str:
        """Everything it has printed so far."""
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """Kill it and the processes that it started, if they still run. Return when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


@contextlib.contextmanager
def started(commands: Sequence[Sequence[str]]) -> Iterator[list[Process]]:
    """A process for each command, run in the root of the repository.

    They are killed at the end. If the test process dies, Linux kills them, but not the processes that they started.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = []
        for index, command in enumerate(commands):
            process = _start(command, folder / f"process-{index}.log")
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def wait(processes: Sequence[Process], timeout_s: float) -> list[int | None]:
    """Exit codes when all have ended. None for one that still runs at the timeout, or ``GRACE_S`` after a failure."""
    deadline = time.monotonic() + timeout_s
    codes: list[int | None] = [None]
    while None in codes and time.monotonic() < deadline:
        time.sleep(0.02)
        codes = [process.popen.poll() for process in processes]
        if any(codes):
            deadline = min(deadline, time.monotonic() + GRACE_S)
    return codes


def on_mesh(
    function: Callable[..., Any], *, processes: int, devices: int, timeout_s: float = 900, **arguments: Any
) -> list[Any]:
    """Return what a function of a module returns in each of ``processes``, which see each other's CPU devices.

    Each process has ``devices``. Arguments and results are JSON. Raise AssertionError with everything they printed,
    unless all exit with 0 in time.
    """
    call = {
        "function": [function.__module__, function.__qualname__],
        "arguments": arguments,
        "coordinator": f"127.0.0.1:{free_port()}",
        "processes": processes,
        "devices": devices,
    }
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / str(process) for process in range(processes)]
        module = [sys.executable, "-m", "tests.multihost.mesh_process"]
        commands = [[*module, json.dumps(call | {"process": i}), str(result)] for i, result in enumerate(results)]
        with started(commands) as running:
            codes = wait(running, timeout_s)
            printed = "\n".join(f"--- process {i}\n{process.output()}" for i, process in enumerate(running))
        assert codes == [0] * processes, f"exit codes {codes} of {function.__qualname__}\n{printed}"
        return [json.loads(result.read_text()) for result in results]


def _start(command: Sequence[str], log: Path) -> Process:
    if sys.platform == "linux":
        command = ["setpriv", "--pdeathsig", "KILL", *command]
    with log.open("wb") as output:
        popen = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Process(popen, log)
