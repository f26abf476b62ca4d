"""``gimbal serve`` as a child process, for code that sends load to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gimbal_jax.client.client import GimbalClient
from gimbal_jax.client.records import Unavailable
from gimbal_jax.serving.network.ports import free_port

START_TIMEOUT_S, STOP_TIMEOUT_S = 120.0, 60.0


@dataclass(frozen=True)
class RunningServer:
    """A server that is ready for requests."""

    target: str
    """Its gRPC address, HOST:PORT."""
    pid: int


@contextlib.asynccontextmanager
async def running_server(
    model: str | Path, options: Sequence[str], log: Path, start_timeout_s: float = START_TIMEOUT_S
) -> AsyncIterator[RunningServer]:
    """Yield a server that is ready. On exit it gets SIGTERM, and must exit with 0. Its output goes to ``log``.

    Raises ChildProcessError if it is not ready in time, or does not stop in order.
    """
    port = free_port()
    target = f"127.0.0.1:{port}"
    with log.open("w") as output:
        command = [sys.executable, "-m", "gimbal_jax.cli", "serve", str(model), "--port", str(port), *options]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        try:
            await until_serving(target, [process], start_timeout_s)
        except ChildProcessError as error:
            raise ChildProcessError(f"{error}:\n{_end_of(log)}") from None
        yield RunningServer(target, process.pid)
        process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        if code != 0:
            raise ChildProcessError(f"the server exited with {code}:\n{_end_of(log)}")
    finally:
        process.kill()
        process.wait()


async def until_serving(target: str, processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Return when the server of these processes is ready. Raises ChildProcessError if one ends, or at the timeout.

    Each try uses a new connection, because gRPC waits before it retries a failed one.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        if any(code is not None for code in codes) or time.monotonic() > deadline:
            raise ChildProcessError(f"the server does not serve (exit code {', '.join(map(str, codes))})")
        with contextlib.suppress(Unavailable):
            async with GimbalClient(target) as client:
                if await client.is_serving():
                    return
        await asyncio.sleep(0.2)


def _end_of(log: Path) -> str:
    return log.read_text()[-2000:]


def peak_rss_bytes(pid: int) -> int | None:
    """Return the peak resident memory of a process in bytes; None on systems without ``/proc``."""
    path = Path("/proc", str(pid), "status")
    if not path.exists():
        return None
    return next(int(line.split()[1]) * 1024 for line in path.read_text().splitlines() if line.startswith("VmHWM:"))


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU seconds of all threads of a process so far; None on systems without ``/proc``."""
    path = Path("/proc", str(pid), "stat")
    if not path.exists():
        return None
    # The program's name may contain blanks, so split after it. Fields 14 and 15 are user and kernel time.
    fields = path.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
