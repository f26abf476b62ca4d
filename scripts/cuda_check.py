"""Compile the server's programs for GPUs without having any, check them, and write the table of docs/cuda.md.

The script runs in the environment that `make cuda-check` makes. By default it compiles two layers of every program and
extends the sizes to all layers. `--layers 0` compiles all layers, which takes much longer.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from typing import Annotated

import jax
import typer
from rich.console import Console

from gimbal_jax.cli.terminal import console, progress_bar
from gimbal_jax.config import GPU_ENGINE, MeshConfig
from gimbal_jax.model.hf_config import PRESETS
from gimbal_jax.planning.check import COLUMNS, check_plan, row, server_config, table
from gimbal_jax.planning.hardware import parse_gpus
from gimbal_jax.planning.plan import PlanRequest
from gimbal_jax.planning.rules import kv_tokens
from scripts.cuda_document import DOCUMENT, markdown, write_section

PLANS = (
    ("Qwen3-30B-A3B", "4xH100", ((2, 2), (1, 4), (4, 1))),
    ("Qwen3-235B-A22B", "8xH100", ((2, 4),)),
    ("Qwen3-235B-A22B", "8xH200", ((2, 4),)),
)
"""(model, GPUs, checked (dp, tp))."""
LEAST_KV_TOKENS = {("Qwen3-30B-A3B", "4xH100", (2, 2)): 950_000}
"""(model, GPUs, (dp, tp)) -> promised minimum tokens of the KV pool of each engine."""


def main(
    layers: Annotated[int, typer.Option(min=0, help="Layers of each model to compile; 0: all.")] = 2,
    write: Annotated[bool, typer.Option("--write", help="Write the table into docs/cuda.md.")] = False,
) -> None:
    jax.config.update("jax_platforms", "cpu")
    logging.getLogger("absl").setLevel(logging.ERROR)  # tokamax warns about every shape without tuning
    rows, broken, started = [], [], time.monotonic()
    for name, gpus, meshes in PLANS:
        gpu, count, nodes = parse_gpus(gpus)
        for dp, tp in meshes:
            request = PlanRequest(PRESETS[name], gpu, count, replace(GPU_ENGINE, max_model_len=32768), nodes=nodes)
            config = server_config(request, MeshConfig(dp, tp, nodes))
            with progress_bar(f"{name} on {gpus}, DP {dp} x TP {tp}") as progress:
                for one in check_plan(request, config, layers=layers or None, progress=progress):
                    rows.append(row(name, request, one))
                    broken += [f"{name} {gpus} {dp} x {tp} {one.kind}: {finding}" for finding in one.findings]
            tokens = kv_tokens(config)
            least = LEAST_KV_TOKENS.get((name, gpus, (dp, tp)), 0)
            if tokens < least:
                broken.append(
                    f"{name} {gpus} {dp} x {tp}: kv pool: {tokens:,} tokens per engine, must be at least {least:,}"
                )
    Console(width=250).print(table(rows))
    for line in broken:
        console.print(line)
    minutes = (time.monotonic() - started) / 60
    console.print(f"{len(rows)} programs in {minutes:.1f} minutes, {len(broken)} findings")
    if write:
        how = f"`python -m scripts.cuda_check --layers {layers} --write`, with jax {jax.__version__}"
        took = f"{len(rows)} programs in {minutes:.0f} minutes on {os.cpu_count()} cores"
        write_section("programs", f"{how}: {took}, {len(broken)} rules broken.\n\n{markdown(COLUMNS, rows)}")
        console.print(f"wrote {DOCUMENT}")
    raise typer.Exit(1 if broken else 0)


if __name__ == "__main__":
    typer.run(main)
