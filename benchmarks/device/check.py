"""Check the results and the speed of one NVIDIA GPU (Hopper or newer), in less than 8 minutes.

    python -m benchmarks.device.check --out device_check.json

1. Compares the kernels with float64 references on fresh random inputs.
2. Times the kernels against plain XLA, and against ceilings measured in the same run.
3. Times the server's step on Qwen3-30B-A3B with random weights. They are 61 GB, made on the GPU. If they do not fit,
   fewer layers run and the result records how many.
4. Times transformers on the same GPU, if it is installed.

Every part runs in a process of its own. A part that fails, hangs or has no time left is recorded, and the others still
run. Exit code 0: all results are right; 1: something is wrong; 2: there is no such GPU.

``--dry-run`` needs no GPU. It runs the same parts at tiny sizes on the CPU, by plain XLA or interpreted kernels, and
its times mean nothing. If XLA's CUDA compiler is installed (``scripts/bootstrap --cuda``), it also compiles all
programs for an H100 at the real sizes.

The JSON::

    {"dry_run": false, "seed": 7, "backend": "mosaic", "budget_s": 450, "wall_s": 391.2, "ok": true,
     "parts": [{"name": "machine", "status": "ok", "reason": "", "wall_s": 6.1, "results": {NAME: {...}}}, ...]}

    status    ok        all results are right
              failed    the results named in ``reason`` have ``ok`` false
              error     the part raised ``reason``
              timeout   the part was stopped at its limit
              skipped   the part did not start; ``reason`` is the cause (no time left, something is not installed)
              All except "skipped" keep the results that the part produced.
    results   machine          versions; the device and its memory; the driver, clocks and power limit by nvidia-smi
              *_numerics       per case: ``ok``, and the errors. Tolerances: ``benchmarks/device/numerics.py``
              ceilings         ``matmul`` (bf16, tflops), ``triad`` (float32, tb_per_s: two reads and a write)
              route_speed      per T: ``fused``, ``xla``, ``without_counting``; ratios, targets and whether met
              ffn_speed        per N: ``tflops``, and ``tb_per_s`` of the weights that N tokens touch on average
              attention_speed  per case: ``tb_per_s`` of the keys and values (decode) or ``tflops`` (prefill)
              model_speed      per step: ``step`` and ``back_to_back``; for decode also the time to read the weights
                               that the step touches (``weight_floor_us``), and with the keys and values
                               (``floor_with_kv_us``)
              transformers     per decode step: ``step``, and ``over_ours``, its time over that of ``model_speed``

    A timing is {"median_us", "min_us", "max_us", "n"}. ``*_share`` is relative to the ceiling measured in this run,
    and null if that part failed. Kernels are timed inside one program that repeats them
    (``benchmarks/device/timing.py``). The step is timed as the server runs it: from host arrays to tokens on the host.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.device.compiled import compiled_for_h100
from benchmarks.device.full_model import check_model, model_speed
from benchmarks.device.machine import machine
from benchmarks.device.numerics import check_attention, check_ffn, check_route
from benchmarks.device.parts import Execute, Part, brief, in_a_child, in_this_process, quiet, run_parts
from benchmarks.device.setting import FULL, TINY, Setting
from benchmarks.device.speed import attention_speed, ceilings, ffn_speed, route_speed
from benchmarks.device.transformers_peer import transformers_speed
from gimbal_jax.cli.terminal import console, fail

MACHINE = Part("machine", machine, limit_s=60)
PARTS: tuple[Part, ...] = (
    MACHINE,
    Part("route_numerics", check_route, limit_s=90),
    Part("ffn_numerics", check_ffn, limit_s=90),
    Part("attention_numerics", check_attention, limit_s=90),
    Part("model_numerics", check_model, limit_s=90),
    Part("ceilings", ceilings, limit_s=60),
    Part("route_speed", route_speed, limit_s=120),
    Part("ffn_speed", ffn_speed, limit_s=120),
    Part("attention_speed", attention_speed, limit_s=120),
    Part("model_speed", model_speed, limit_s=240),
    Part("transformers", transformers_speed, limit_s=150),
)
SHOWN = {
    "machine": ("name", "driver", "jax"),
    "ceilings": ("tflops", "tb_per_s"),
    "route_speed": ("fused", "xla", "faster_than_xla", "over_uncounted"),
    "ffn_speed": ("tflops", "tflops_share", "tb_per_s", "tb_per_s_share"),
    "attention_speed": ("tflops", "tflops_share", "tb_per_s", "tb_per_s_share"),
    "model_speed": ("layers", "wall_s", "step", "back_to_back", "back_to_back_over_weight_floor"),
    "transformers": ("transformers", "step", "over_ours"),
}
"""Part -> keys of its results that the table shows. For other parts it shows the number of right results."""
COMPILED = Part("compiled_for_h100", compiled_for_h100, limit_s=900)


def report(records: Sequence[dict[str, Any]], **facts: Any) -> dict[str, Any]:
    """Return the JSON report."""
    ok = all(record["status"] in ("ok", "skipped") for record in records)
    return {**facts, "ok": ok, "wall_s": round(sum(record["wall_s"] for record in records), 3), "parts": list(records)}


def table(records: Sequence[dict[str, Any]]) -> Table:
    """Return a table of the main numbers of each part."""
    shown = Table("part", "status", "results", title="device check")
    for record in records:
        results = record["results"]
        if keys := SHOWN.get(record["name"]):
            texts = {
                name: brief({key: result[key] for key in keys if key in result}) for name, result in results.items()
            }
            lines = [f"{name}: {text}" for name, text in texts.items() if text]
        else:
            lines = [f"{sum(result['ok'] for result in results.values())} of {len(results)} right"]
        shown.add_row(record["name"], record["status"], "\n".join([*lines, record["reason"]]).strip())
    return shown


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("device_check.json"),
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of all random numbers; default: random, and printed.")
    ] = None,
    budget_s: Annotated[
        float, typer.Option(min=1, help="Seconds for all parts. Parts that no longer fit are skipped.")
    ] = 450.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tiny sizes on the CPU; compile for an H100.")] = False,
    interpret: Annotated[bool, typer.Option("--interpret", help="Dry run: interpret the kernels on the CPU.")] = False,
) -> None:
    """Check one GPU."""
    seed = secrets.randbelow(2**31) if seed is None else seed
    # jax reads this when it first looks for devices. The whole model needs more memory than jax's default of 75 %.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    if dry_run:
        jax.config.update("jax_platforms", "cpu")
        setting, parts = Setting(TINY, "interpret" if interpret else "xla", seed), (*PARTS, COMPILED)
        execute: Execute = in_this_process
    else:
        setting, parts, execute = Setting(FULL, "mosaic", seed), PARTS, in_a_child
        if (found := backend_found(setting)) != "mosaic":
            fail(f"no Hopper or newer NVIDIA GPU here ({found}); try --dry-run")

    quiet()
    console.print(f"seed {seed}")
    records = run_parts(parts, setting, budget_s, execute, time.monotonic, console.print)
    facts = {"dry_run": dry_run, "seed": seed, "backend": setting.backend, "budget_s": budget_s}
    result = report(records, **facts)
    out.write_text(json.dumps(result, indent=1))
    Console().print(table(records))
    console.print(f"{'all right' if result['ok'] else 'something is wrong'}; written to {out}")
    raise typer.Exit(0 if result["ok"] else 1)


def backend_found(setting: Setting) -> str:
    """Return "mosaic", or the name of jax's first device if its backend is another one. Runs in a child process."""
    device = dict(in_a_child(MACHINE, setting, MACHINE.limit_s))["device"]
    return device["backend"] if device["backend"] == "mosaic" else f"jax sees {device['name']}"


if __name__ == "__main__":
    typer.run(main)
