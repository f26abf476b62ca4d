"""Compilation for one H100."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax

from gimbal_jax.planning.hardware import gpu_kinds
from gimbal_jax.planning.kernels import CompiledKernels, KernelResources, compile_with_kernels
from gimbal_jax.planning.target import compile_only_devices

KNOWN: dict[bytes, KernelResources] = {}
"""Resources of the kernels that this process has compiled, by kernel."""


@cache
def h100() -> jax.Device:
    return compile_only_devices(gpu_kinds()["H100"], 1)[0]


def compile_for_h100(function: Callable[..., Any], *shapes: jax.ShapeDtypeStruct) -> CompiledKernels:
    """Return the compiled program, its temporaries and its kernels' registers, spills and shared memory."""
    return compile_with_kernels(function, *shapes, device=h100(), known=KNOWN)


def shape(dtype: Any, *dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)
