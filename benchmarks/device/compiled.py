"""Compile all programs of the check at their real sizes for an H100, without a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from benchmarks.device import numerics, speed
from benchmarks.device.parts import AbsentError, Result
from benchmarks.device.random_model import engine_of, first_layers
from benchmarks.device.setting import FULL, Setting
from benchmarks.device.timing import Timed, fast_key, looped
from gimbal_jax.config import MeshConfig, ModelConfig, ServerConfig
from gimbal_jax.model.inputs import Bucket
from gimbal_jax.pallas_kernels import backend_of
from gimbal_jax.planning.compiled import compile_step
from gimbal_jax.planning.hardware import Gpu, gpu_kinds
from gimbal_jax.planning.target import compile_only_devices

STEP_LAYERS = 2
"""Layers of the model whose step is compiled. All other layers are the same."""


def compiled_for_h100(setting: Setting) -> Iterator[Result]:
    """Yield compile seconds and temporary bytes of each program; ``ok`` is False if it does not compile."""
    gpu = gpu_kinds()["H100"]
    try:
        device = compile_only_devices(gpu, 1)[0]
    except RuntimeError as error:
        raise AbsentError(str(error)) from error
    real = Setting(FULL, backend_of(device), setting.seed, setting.ops)
    for name, op, arguments in programs(real):
        yield name, _guarded(partial(_compile, op, arguments, device))

    engine = engine_of(FULL)
    config = ServerConfig(MeshConfig(), engine)
    model = first_layers(FULL.model, STEP_LAYERS)
    buckets = {f"decode {batch}": (batch, 0) for batch in FULL.batches}
    buckets[f"prefill {FULL.prefill_tokens}"] = (1, FULL.prefill_tokens // engine.tile)
    for name, bucket in buckets.items():
        yield f"{STEP_LAYERS}-layer step, {name}", _guarded(partial(_step, model, config, gpu, bucket))


def programs(setting: Setting) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, function and arguments (or their shapes) of all programs except the steps."""
    sizes = setting.sizes
    # Check cases need real weights. The largest sizes are compiled only as timed programs, which need shapes alone.
    most = min(slots for _, slots in sizes.ffn_checks)
    sizes = replace(sizes, ffn_checks=tuple((n, slots) for n, slots in sizes.ffn_checks if slots == most))
    checks = replace(setting, sizes=sizes)
    checked: dict[str, Iterator[numerics.Case]] = {
        "route": numerics.route_cases(checks),
        "ffn": numerics.ffn_cases(checks),
        "attention": numerics.attention_cases(checks),
    }
    seen = set()
    for part, cases in checked.items():
        for case in cases:
            # Cases that differ only in their values are one program.
            program = part, str(case.op.keywords), tuple(argument.shape for argument in case.arguments)
            if program not in seen:
                seen.add(program)
                yield f"{part} check, {case.name}", case.op, case.arguments
    timed: dict[str, Iterable[Timed]] = {
        "ceiling": speed.ceiling_cases(setting),
        "route": (case for _, cases in speed.route_cases(setting) for case in cases),
        "ffn": speed.ffn_cases(setting),
        "attention": speed.attention_cases(setting),
    }
    for part, programs in timed.items():
        for one in programs:
            arguments = jax.eval_shape(one.make, fast_key(setting.seed))
            yield f"{part} timed, {one.name}", looped(one.op, setting.sizes.rounds), arguments


def _compile(op: Any, arguments: Any, device: jax.Device) -> dict[str, Any]:
    began = time.perf_counter()
    on_device = SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=on_device), arguments)
    with jax.default_device(device):
        memory = jax.jit(op).lower(*shapes).compile().memory_analysis()
    assert memory is not None
    return {"ok": True, "temporary_bytes": memory.temp_size_in_bytes, "compile_s": time.perf_counter() - began}


def _step(model: ModelConfig, config: ServerConfig, gpu: Gpu, bucket: Bucket) -> dict[str, Any]:
    program = compile_step(model, config, gpu, bucket)
    return {"ok": True, "temporary_bytes": program.temporary_bytes, "compile_s": program.compile_s}


def _guarded(compile_one: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of one program, or the error if it does not compile, so that the others are still tried."""
    try:
        return compile_one()
    except Exception as error:
        return {"ok": False, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
