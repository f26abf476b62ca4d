"""Measure the host memory of a server: a table with one row for each stage of its start.

    python -m benchmarks.memory FOLDER --dp 1 --tp 1

The server runs in a process of its own, on CPU devices, whose memory is the host's. The column "expected" comes from
``gimbal_jax.model.memory``. It covers weights, KV pages and tables, not the compiled programs. XLA needs tens of
megabytes of heap for each program of a few layers.
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
    """Memory after one stage of the start."""

    name: str
    expected: int | None
    """Bytes that the stage should add to the process's own memory; None if unknown."""
    memory: HostMemory


def measure(folder: Path, config: ServerConfig, dtype: str, buckets: int | None, send: Callable[[Stage], None]) -> None:
    """Start a server as ``gimbal serve`` does, up to its warm-up, and send each stage."""

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
    stage("freed memory returned")


def _child(connection: Connection, folder: Path, config: ServerConfig, dtype: str, buckets: int | None) -> None:
    measure(folder, config, dtype, buckets, connection.send)


def stages_of(folder: Path, config: ServerConfig, dtype: str, buckets: int | None) -> list[Stage]:
    """Return the stages of ``measure``, run in a process of its own. Raises RuntimeError if the process fails."""
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
        raise RuntimeError(f"the measured process ended with exit code {process.exitcode}")
    return stages


def table(stages: list[Stage]) -> Table:
    """Return a table in megabytes: expected and measured growth of each stage, and the process's memory after it."""
    rows = Table("stage", "expected", "added", "own", "files", "peak in stage", title="host memory, MB")
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
    dtype: Annotated[str, typer.Option(help="Type of hidden states and KV cache.")] = "float32",
    max_model_len: int = 1024,
    max_rows: int = 32,
    num_pages: int = EngineConfig.num_pages,
    buckets: Annotated[int | None, typer.Option(help="Compile only this many of the largest steps.")] = None,
) -> None:
    """Measure the memory of each stage and print a table."""
    engine = EngineConfig(max_model_len=max_model_len, max_rows=max_rows, num_pages=num_pages)
    Console().print(table(stages_of(folder, ServerConfig(MeshConfig(dp, tp), engine), dtype, buckets)))


if __name__ == "__main__":
    typer.run(main)
