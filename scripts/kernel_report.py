"""Report the registers, spills and shared memory of every Mosaic GPU kernel on an H100, without a GPU.

XLA's CUDA compiler must be installed, as by `make cuda-check`. Other programs call `report` for the rows.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from jax.typing import DTypeLike
from rich.console import Console
from rich.table import Table

from gimbal_jax.pallas_kernels import grouped_ffn, paged_attention, route_and_count
from gimbal_jax.planning.hardware import gpu_kinds
from gimbal_jax.planning.kernels import KernelResources, compile_with_kernels
from gimbal_jax.planning.target import compile_only_devices
from scripts.cuda_document import markdown, write_section
from tests.pallas_kernels.shapes import QWEN3_ATTENTION, ROUTING

COLUMNS = ("kernel", "case", "registers", "bytes spilled", "shared, KiB", "temporaries, KiB", "compile, s")


@dataclass(frozen=True)
class Case:
    """One program to compile."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True)
class Row:
    """One kernel of one case."""

    case: str
    kernel: KernelResources
    temporary_bytes: int
    """Temporaries of the whole program of the case."""
    compile_s: float


def routing() -> Iterator[Case]:
    for name, of in ROUTING.items():
        yield Case(
            f"{name}: T {of.tokens}, E {of.experts}, k {of.k}, R {of.ranks}",
            partial(route_and_count, k=of.k, renormalise=True, ranks=of.ranks, backend="mosaic"),
            (
                array(jnp.float32, of.tokens, of.experts),
                array(jnp.bool_, of.tokens),
                array(jnp.int32, of.experts),
            ),
        )


def attention() -> Iterator[Case]:
    for name, of in QWEN3_ATTENTION.items():
        pages = array(jnp.bfloat16, of.num_pages, of.page_size, of.kv_heads, of.dim)
        q_GQHD = array(jnp.bfloat16, of.groups, of.queries, of.heads, of.dim)
        table_GM = array(jnp.int32, of.groups, of.pages_per_row)
        of_group = array(jnp.int32, of.groups)
        yield Case(
            f"{name}: G {of.groups}, Q {of.queries}, H {of.heads}, K {of.kv_heads}, page {of.page_size}",
            partial(paged_attention, backend="mosaic"),
            (q_GQHD, pages, pages, table_GM, of_group, of_group),
        )


def array(dtype: DTypeLike, *dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def products() -> Iterator[Case]:
    """Yield cases of one of four ranks, which has 32 of 128 experts."""
    for name, tokens in (("decode", 256), ("prefill", 16384)):
        yield Case(
            f"{name}: N {tokens}, P 32, k 8, D 2048, I 768",
            partial(grouped_ffn, ranks=4, backend="mosaic"),
            (
                array(jnp.bfloat16, tokens, 2048),
                array(jnp.int32, tokens, 8),
                array(jnp.float32, tokens, 8),
                array(jnp.int32, 32),
                array(jnp.bfloat16, 32, 2048, 1536),
                array(jnp.bfloat16, 32, 768, 2048),
            ),
        )


CASES: tuple[Callable[[], Iterator[Case]], ...] = (routing, attention, products)
"""Functions that yield the cases of every operation with a kernel."""


def report(cases: Iterator[Case], gpu: str = "H100") -> Iterator[Row]:
    """Compile the cases one by one and yield a row per kernel. The environment must have MOSAIC_GPU_DUMP_PTXAS=1."""
    device, known = compile_only_devices(gpu_kinds()[gpu], 1)[0], dict[bytes, KernelResources]()
    for case in cases:
        started = time.perf_counter()
        compiled = compile_with_kernels(case.function, *case.arguments, device=device, known=known)
        seconds = time.perf_counter() - started
        yield from (Row(case.name, kernel, compiled.temporary_bytes, seconds) for kernel in compiled.kernels)


def cells(row: Row) -> tuple[str, ...]:
    spilled = row.kernel.spill_store_bytes + row.kernel.spill_load_bytes
    sizes = (row.kernel.shared_memory_bytes / 1024, row.temporary_bytes / 1024, row.compile_s)
    return (row.kernel.name, row.case, str(row.kernel.registers), str(spilled), *(f"{size:.1f}" for size in sizes))


def table(rows: list[Row]) -> Table:
    out = Table(*COLUMNS)
    for column in out.columns[2:]:
        column.justify = "right"
    for row in rows:
        out.add_row(*cells(row))
    return out


def main(
    out: Annotated[Path | None, typer.Option("--json", help="JSON file for the rows.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Write the table into docs/cuda.md.")] = False,
) -> None:
    """Compile every kernel for an H100 and print its resources. Exit code 1 if a kernel spills."""
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    jax.config.update("jax_platforms", "cpu")
    rows = list(report(case for cases in CASES for case in cases()))
    Console(width=140).print(table(rows))
    if write:
        how = f"`python -m scripts.kernel_report --write`, with jax {jax.__version__}"
        write_section("kernels", f"{how}:\n\n{markdown(COLUMNS, [cells(row) for row in rows])}")
    if out:
        out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    if any(row.kernel.spill_store_bytes + row.kernel.spill_load_bytes for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
