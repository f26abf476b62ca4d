"""``gimbal serve`` in several processes on one host, and load on it. Limits are far above what a busy host needs."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from gimbal_jax.bench.server_process import until_serving
from gimbal_jax.client.client import GimbalClient
from gimbal_jax.client.records import ClientError
from gimbal_jax.serving.network.ports import free_port
from tests.multihost.processes import Process, started

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "goldens" / "base"
GIMBAL = Path(sys.executable).with_name("gimbal")
# Two shapes of steps to compile. Placements are decided when a client asks.
LIMITS = (
    *("--max-rows", "2", "--token-budget", "8", "--tile", "8", "--page-size", "4", "--num-pages", "200"),
    *("--max-queue", "1000", "--placement", "eplb", "--window-steps", "1000000", "--drain-timeout", "600"),
)
SECRET = "the secret of these tests"
START_S = 900


@dataclass(frozen=True)
class Cluster:
    """A server that serves. Its first process leads."""

    processes: list[Process]
    client: GimbalClient
    target: str

    @property
    def leader(self) -> Process:
        return self.processes[0]


def secret_file(folder: Path, secret: str = SECRET) -> Path:
    path = folder / "secret"
    path.write_text(secret + "\n")
    path.chmod(0o600)
    return path


@cache
def ports_of(folder: Path) -> tuple[int, int, int]:
    """Ports for clients, coordinator and commands. A server that restarts gets the same ones."""
    return free_port(), free_port(), free_port()


def serve_commands(
    folder: Path, processes: int, devices: int, options: tuple[str, ...], *, slurm: bool = False
) -> list[list[str]]:
    """A command for each process. Under ``slurm`` each process finds its own index."""
    usual = [str(GIMBAL), "serve", str(FOLDER), "--devices", f"cpu:{devices}", *LIMITS, *options]
    usual += ["--compile-cache", str(folder / "compiled")]
    if processes == 1:
        return [usual]
    _, coordinator, commands = ports_of(folder)
    usual += ["--command-port", str(commands), "--secret-file", str(secret_file(folder))]
    if slurm:
        step = ["env", "SLURM_JOB_ID=1", "SLURM_STEP_NODELIST=127.0.0.1", f"SLURM_NTASKS={processes}"]
        step.append(f"JAX_COORDINATOR_PORT={coordinator}")
        places = [[f"SLURM_PROCID={process}", f"SLURM_LOCALID={process}"] for process in range(processes)]
        return [[*step, *place, *usual, "--coordinator", "auto"] for place in places]
    usual += ["--coordinator", f"127.0.0.1:{coordinator}", "--processes", str(processes)]
    return [[*usual, "--process", str(process)] for process in range(processes)]


@contextlib.asynccontextmanager
async def cluster(
    folder: Path, processes: int, devices: int, dp: int, tp: int, *options: str, slurm: bool = False
) -> AsyncIterator[Cluster]:
    """``processes`` with ``devices`` each that serve, all with the same options. They are killed at the end."""
    port, *_ = ports_of(folder)
    target, mesh = f"127.0.0.1:{port}", ("--dp", str(dp), "--tp", str(tp), "--port", str(port))
    with started(serve_commands(folder, processes, devices, (*mesh, *options), slurm=slurm)) as running:
        try:
            await until_serving(target, [process.popen for process in running], START_S)
        except ChildProcessError as error:
            raise AssertionError(f"{error}\n{printed(running)}") from None
        async with GimbalClient(target) as client:
            yield Cluster(running, client, target)


def printed(running: list[Process]) -> str:
    return "\n".join(f"--- process {index}\n{process.output()}" for index, process in enumerate(running))


async def answer(client: GimbalClient, i: int, max_tokens: int = 24) -> tuple[list[int], str]:
    """Greedy tokens of one stream, and its end: a finish reason, or a status and its text."""
    rng = np.random.default_rng(i)
    prompt = rng.integers(3, 128, rng.integers(1, 20)).tolist()
    tokens: list[int] = []
    end = ""
    try:
        async for chunk in client.generate(token_ids=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True):
            tokens += chunk.token_ids
            end = chunk.finish_reason or ""
    except ClientError as error:
        end = f"{error.code.name}: {error}"
    return tokens, end


async def answers(client: GimbalClient, count: int, max_tokens: int = 24) -> list[tuple[list[int], str]]:
    return await asyncio.gather(*(answer(client, i, max_tokens) for i in range(count)))


async def exit_codes(running: list[Process], timeout_s: float) -> list[int | None]:
    """Exit codes when all processes have ended or the time is over. None for a process that still runs."""
    deadline = time.monotonic() + timeout_s
    while (codes := [process.popen.poll() for process in running]).count(None) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return codes
