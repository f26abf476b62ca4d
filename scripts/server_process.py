"""``gimbal serve`` as a process of its own, for the scripts that put load on it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gimbal_jax.serving.client import GimbalClient
from gimbal_jax.serving.client_records import Unavailable

GIMBAL = Path(sys.executable).with_name("gimbal")
START_TIMEOUT_S, STOP_TIMEOUT_S = 120.0, 60.0


@dataclass(frozen=True)
class RunningServer:
    """A server that serves."""

    target: str
    """Its gRPC address, HOST:PORT."""
    pid: int


@contextlib.asynccontextmanager
async def running_server(model: Path, options: Sequence[str], log: Path) -> AsyncIterator[RunningServer]:
    """A server that serves; afterwards it is told to stop, and must exit with 0. Its output goes to ``log``."""
    port = free_port()
    target = f"127.0.0.1:{port}"
    with log.open("w") as output:
        command = [str(GIMBAL), "serve", str(model), "--port", str(port), *options]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        await _serving(target, process, log)
        yield RunningServer(target, process.pid)
        process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        if code != 0:
            raise SystemExit(f"the server exited with {code}; its log is {log}")
    finally:
        process.kill()
        process.wait()


async def _serving(target: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Returns when the server serves; a new connection each time, since a refused one waits before it retries."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the server does not serve (exit code {process.poll()}):\n{log.read_text()[-2000:]}")
        with contextlib.suppress(Unavailable):
            async with GimbalClient(target) as client:
                if await client.is_serving():
                    return
        await asyncio.sleep(0.2)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
