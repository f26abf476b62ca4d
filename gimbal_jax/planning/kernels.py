"""Registers and memory that the Mosaic GPU kernels of a program need, read from the compiler without a GPU.

The assembler prints registers and spills on standard output if MOSAIC_GPU_DUMP_PTXAS is set to 1 before the process
compiles its first kernel. It prints them once per kernel and process, because XLA does not compile a kernel again.
"""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import jax
from jax.sharding import SingleDeviceSharding

PTXAS = re.compile(
    r"Compiling entry function '(?P<name>\w+)_mosaic_gpu_kernel'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class KernelResources:
    """Needs of one kernel: registers and bytes of local memory per thread, bytes of shared memory per block."""

    name: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_memory_bytes: int


@dataclass(frozen=True)
class CompiledKernels:
    """A compiled program and its Mosaic GPU kernels, each once, in the order of their calls."""

    program: jax.stages.Compiled
    kernels: tuple[KernelResources, ...]

    @property
    def temporary_bytes(self) -> int:
        """Device memory of the program in addition to arguments and results."""
        memory: Any = self.program.memory_analysis()
        return memory.temp_size_in_bytes


def compile_with_kernels(
    function: Callable[..., Any], *shapes: jax.ShapeDtypeStruct, device: jax.Device, known: dict[bytes, KernelResources]
) -> CompiledKernels:
    """Compile ``function`` for ``device``, which need not exist (see ``compile_only_devices``).

    Args:
      function: a function, or a jitted one.
      shapes: its arguments; all of them go to ``device``.
      device: the device to compile for.
      known: the kernels of this process by hash; the caller keeps it, and new ones are added.

    Raises: see ``compile_and_tell``.
    """
    sharding = SingleDeviceSharding(device)
    placed = [jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding) for shape in shapes]
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    with jax.default_device(device):
        lowered = jitted.lower(*placed)
    return compile_and_tell(lowered, lowered.compile, known)


def compile_and_tell(
    lowered: jax.stages.Lowered, compile_it: Callable[[], jax.stages.Compiled], known: dict[bytes, KernelResources]
) -> CompiledKernels:
    """Compile ``lowered`` by ``compile_it``, and return its kernels, too; ``known`` as in ``compile_with_kernels``.

    RuntimeError if the assembler printed nothing about a new kernel.
    """
    called = {call.hash: call for call in _kernel_calls(lowered)}
    with tempfile.TemporaryFile("w+") as output, _standard_output_to(output):
        program = compile_it()
        _flush_c()
        output.seek(0)
        printed = list(PTXAS.finditer(output.read()))
    for call in called.values():
        if call.hash in known:
            continue
        # Kernels of one name differ in their hashes only, which the assembler does not print: their order decides.
        line = next((line for line in printed if line["name"] == call.name), None)
        if line is None:
            raise RuntimeError(
                f"no resources of kernel {call.name}: set MOSAIC_GPU_DUMP_PTXAS=1 before the first compile"
            )
        printed.remove(line)
        known[call.hash] = KernelResources(
            call.name,
            registers=int(line["registers"]),
            stack_bytes=int(line["stack"]),
            spill_store_bytes=int(line["stores"]),
            spill_load_bytes=int(line["loads"]),
            shared_memory_bytes=call.shared_memory_bytes,
        )
    return CompiledKernels(program, tuple(known[hash] for hash in called))


@dataclass(frozen=True)
class _KernelCall:
    hash: bytes
    name: str
    shared_memory_bytes: int


def _kernel_calls(lowered: jax.stages.Lowered) -> Iterator[_KernelCall]:
    module: Any = lowered.compiler_ir()
    module.context.allow_unregistered_dialects = True
    for op in _operations(module.operation):
        if op.name == "stablehlo.custom_call" and op.attributes["call_target_name"].value == "mosaic_gpu_v2":
            config = op.attributes["mhlo.backend_config"]
            kernel = type(module).parse(config["module"].value_bytes, module.context).operation
            launch = next(op for op in _operations(kernel) if op.name.endswith("gpu.launch"))
            shared = launch.operands[len(launch.operands) - 1].owner.attributes["value"].value
            yield _KernelCall(config["kernel_hash"].value_bytes, kernel.attributes["sym_name"].value, shared)


def _operations(operation: Any) -> Iterator[Any]:
    """Yield the operation and all operations inside it."""
    yield operation
    for region in operation.regions:
        for block in region:
            for child in block:
                yield from _operations(child.operation)


@contextmanager
def _standard_output_to(file: IO[str]) -> Iterator[None]:
    """Redirect standard output to a file, also for C code."""
    _flush_c()
    saved = os.dup(1)
    os.dup2(file.fileno(), 1)
    try:
        yield
    finally:
        _flush_c()
        os.dup2(saved, 1)
        os.close(saved)


def _flush_c() -> None:
    ctypes.CDLL(None).fflush(None)
