"""All programs of the check at their real sizes, compiled for an H100 that is not there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax

from gimbal_jax.config import MeshConfig, ServerConfig
from gimbal_jax.pallas_kernels import backend_of
from gimbal_jax.planning.compiled import compile_step
from gimbal_jax.planning.gpus import gpu_kinds
from gimbal_jax.planning.target import compile_only_devices
from scripts.device_checks import numerics, speed
from scripts.device_checks.full_model import engine_of
from scripts.device_checks.parts import AbsentError, Result
from scripts.device_checks.setting import FULL, Setting
from scripts.device_checks.timing import looped

STEP_LAYERS = 2
"""Of the model whose step is compiled: the others are the same."""


def compiled_for_h100(setting: Setting) -> Iterator[Result]:
    """Seconds to compile each, and what it needs besides its arguments; a program that does not compile is an error."""
    gpu = gpu_kinds()["H100"]
    try:
        device = compile_only_devices(gpu, 1)[0]
    except RuntimeError as error:
        raise AbsentError(str(error)) from error
    real = Setting(FULL, backend_of(device), setting.seed, setting.ops)
    for name, op, arguments in programs(real):
        yield name, guarded(lambda op=op, arguments=arguments: _compile(op, arguments, device))  # type: ignore[misc]

    engine = engine_of(FULL)
    model = replace(FULL.model, num_layers=STEP_LAYERS, moe_layers=tuple(range(STEP_LAYERS)))
    buckets = {f"decode {batch}": (batch, 0) for batch in FULL.batches}
    buckets[f"prefill {FULL.prefill_tokens}"] = (1, FULL.prefill_tokens // engine.tile)
    for name, bucket in buckets.items():
        config = ServerConfig(MeshConfig(), engine)
        yield f"{STEP_LAYERS}-layer step, {name}", guarded(lambda b=bucket, c=config: _step(model, c, gpu, b))  # type: ignore[misc]


def programs(setting: Setting) -> Iterator[tuple[str, Any, Any]]:
    """Name, function and arguments (or their shapes) of everything but the steps."""
    sizes = setting.sizes
    # The largest weights are left to the timed programs, which make none here.
    most = min(slots for _, slots in sizes.ffn_checks)
    sizes = replace(sizes, ffn_checks=tuple((n, slots) for n, slots in sizes.ffn_checks if slots == most))
    checks = replace(setting, sizes=sizes)
    for part, cases in (
        ("route", numerics.route_cases(checks)),
        ("ffn", numerics.ffn_cases(checks)),
        ("attention", numerics.attention_cases(checks)),
    ):
        for case in cases:
            yield f"{part} check, {case.name}", case.op, case.arguments
    timed = {
        "ceiling": speed.ceiling_cases(setting),
        "route": (case for cases in speed.route_cases(setting) for case in cases),
        "ffn": speed.ffn_cases(setting),
        "attention": speed.attention_cases(setting),
    }
    for part, cases in timed.items():
        for case in cases:
            arguments = jax.eval_shape(case.make, jax.random.key(setting.seed))
            yield f"{part} timed, {case.name}", looped(case.op, setting.sizes.rounds), arguments
