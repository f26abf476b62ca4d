"""Where a server's host memory goes: a table of each stage of its start, in a process of its own.

    python -m benchmarks.memory FOLDER --dp 1 --tp 1

On CPU devices, whose memory is the host's. Expected is what ``gimbal_jax.model.memory`` says of weights, KV pages and
a step's temporaries, the last from above. Compiled programs are XLA's: tens of megabytes of heap each for a few layers.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gimbal_jax.config import EngineConfig, MeshConfig, ServerConfig
from gimbal_jax.serving.runtime.host_memory import HostMemory, forget_peak, host_memory, trim_heap

MB = 1e6


@dataclass(frozen=True)
class Stage:
    """Memory after one step of the start."""

    name: str
    expected: int | None
    """What the step should add to the process's own memory; None if nothing says."""
    memory: HostMemory


def measure(folder: Path, config: ServerConfig, dtype: str, buckets: int | None, send: Callable[[Stage], None]) -> None:
    """Start a server as ``gimbal serve`` does, up to its first steps, and send each stage."""

    def stage(name: str, expected: int | None = None) -> None:
        send(Stage(name, expected, host_memory()))
        forget_peak()

    from gimbal_jax.serving.runtime.devices import load_on_mesh, set_up_devices

    ranks = config.mesh.ranks
    devices = set_up_devices(f"cpu:{ranks}", config.mesh)
    from gimbal_jax.model.hf_config import load_config
    from gimbal_jax.model.loading import weights_dtype_on_cpu
    from gimbal_jax.model.memory import device_bytes
    from gimbal_jax.serving.runtime.device_runner import DeviceRunner

    stage("libraries")
    model = replace(load_config(folder), dtype=dtype, weights_dtype=weights_dtype_on_cpu(folder, dtype))
    weights, slots, mesh = load_on_mesh(folder, model, config.mesh, devices, model.weights_dtype)
    runner = DeviceRunner(model, config, mesh, weights, slots, dtype)
    del weights
    runner.buckets = runner.buckets[-(buckets or len(runner.buckets)) :]
    needed = device_bytes(model, config, runner.buckets[-1], "xla")
    pages = config.engine.num_pages * needed.page
    stage("weights, KV pages and tables", ranks * (needed.weights.total + pages + needed.tables))
    runner.warm_up()
    stage(f"warm-up, {len(runner.buckets)} step programs")
    trim_heap()
    stage("freed memory given back")


def _child(connection: Connection, folder: Path, config: ServerConfig, dtype: str, buckets: int | None) -> None:
    measure(folder, config, dtype, buckets, connection.send)


def stages_of(folder: Path, config: ServerConfig, dtype: str, buckets: int | None) -> list[Stage]:
    """``measure`` in a process of its own. RuntimeError if it fails."""
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_child, args=(sender, folder, config, dtype, buckets))
    process.start()
    sender.close()
    stages: list[Stage] = []
    try:
        while True:
            stages.append(receiver.recv())
    except EOFError:
        process.join()
    if process.exitcode:
        raise RuntimeError(f"the measured process ended with {process.exitcode}")
    return stages


def table(stages: list[Stage]) -> Table:
    """Megabytes: what each stage should add and added, and what the process then holds."""
    rows = Table("stage", "expected", "added", "own", "files", "peak meanwhile", title="host memory, MB")
    for column in rows.columns[1:]:
        column.justify = "right"
    before = 0
    for one in stages:
        own, files, peak = (f"{size / MB:,.0f}" for size in (one.memory.own, one.memory.files, one.memory.peak))
        expected = "" if one.expected is None else f"{one.expected / MB:,.0f}"
        rows.add_row(one.name, expected, f"{(one.memory.own - before) / MB:+,.0f}", own, files, peak)
        before = one.memory.own
    return rows


def main(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder.")],
    dp: int = 1,
    tp: int = 1,
    dtype: Annotated[str, typer.Option(help="Of hidden states and cache.")] = "float32",
    max_model_len: int = 1024,
    max_rows: int = 32,
    num_pages: int = EngineConfig.num_pages,
    buckets: Annotated[int | None, typer.Option(help="Compile the largest so many steps only.")] = None,
) -> None:
    """Measure and print."""
    engine = EngineConfig(max_model_len=max_model_len, max_rows=max_rows, num_pages=num_pages)
    Console().print(table(stages_of(folder, ServerConfig(MeshConfig(dp, tp), engine), dtype, buckets)))


if __name__ == "__main__":
    typer.run(main)
