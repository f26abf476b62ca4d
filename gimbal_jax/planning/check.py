"""A planned mesh, checked by compiling the programs of its server, and the results as rows of a table."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

from rich.table import Table

from gimbal_jax.config import Exchange, MeshConfig, ServerConfig
from gimbal_jax.model.inputs import Bucket
from gimbal_jax.model.memory import GB, device_bytes
from gimbal_jax.planning.compiled import Program, StepKind, bucket_kinds, compile_migration, compile_step
from gimbal_jax.planning.plan import PlanRequest, Rejected, fit_memory
from gimbal_jax.planning.rules import Finding, Subject, census, findings, kv_tokens, mesh_groups

COLUMNS = (
    "model and GPUs",
    "DP x TP",
    "exchange",
    "program",
    "weights, GB",
    "KV tokens per engine",
    "temporaries, GB (limit)",
    "peak, GB (limit)",
    "collectives",
    "layers compiled",
    "compile, s",
    "rules broken",
)
"""Sizes are per GPU; GB is 10^9 bytes."""


@dataclass(frozen=True)
class Checked:
    """One program of a planned mesh."""

    config: ServerConfig
    """Settings with the KV pool of the plan."""
    kind: StepKind | Literal["migration"]
    bucket: Bucket | None
    """(decode rows, prefill tiles); None for the migration."""
    program: Program
    findings: tuple[Finding, ...]


def server_config(request: PlanRequest, mesh: MeshConfig) -> ServerConfig:
    """Return settings with the KV pool of the plan. ValueError if the mesh does not serve the model."""
    fitted = fit_memory(request, mesh)
    if isinstance(fitted, Rejected):
        raise ValueError(f"dp {mesh.dp} x tp {mesh.tp}: {fitted.reason}")
    _, tokens = fitted
    engine = replace(request.engine, num_pages=tokens // request.engine.page_size)
    return ServerConfig(mesh, engine, placement=request.placement)


def check_plan(
    request: PlanRequest,
    config: ServerConfig,
    *,
    exchanges: tuple[Exchange, ...] = ("gather", "sparse"),
    layers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Checked]:
    """Compile and check every kind of step by each exchange, and the migration.

    Args:
      request: model and GPUs.
      config: settings, from ``server_config``.
      exchanges: forms of the MoE exchange.
      layers: see ``compile_step``.
      progress: called with the number of finished programs and the number of all.
    """
    r = request

    def checked(
        config: ServerConfig, kind: StepKind | Literal["migration"], bucket: Bucket | None, program: Program
    ) -> Checked:
        subject = Subject(program, r.model, config, r.gpu, r.utilisation, bucket)
        return Checked(config, kind, bucket, program, tuple(findings(subject)))

    def migration() -> Checked:
        return checked(config, "migration", None, compile_migration(r.model, config, r.gpu))

    def step(exchange: Exchange, kind: StepKind, bucket: Bucket) -> Checked:
        chosen = replace(config, engine=replace(config.engine, exchange=exchange))
        return checked(chosen, kind, bucket, compile_step(r.model, chosen, r.gpu, bucket, layers))

    # XLA compiles outside the interpreter lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(migration)]
        for exchange in exchanges:
            jobs += [pool.submit(step, exchange, kind, bucket) for kind, bucket in bucket_kinds(config).items()]
        for done, job in enumerate(jobs):
            if progress is not None:
                progress(done, len(jobs))
            yield job.result()
        if progress is not None:
            progress(len(jobs), len(jobs))


def row(name: str, request: PlanRequest, checked: Checked) -> tuple[str, ...]:
    """Return the cells of one program, in the order of ``COLUMNS``."""
    config, program = checked.config, checked.program
    memory = device_bytes(request.model, config, checked.bucket or (0, 0), request.gpu.backend)
    gpus = f"{request.nodes}x" * (request.nodes > 1) + f"{request.per_node}x{request.gpu.name}"
    common = (f"{name}, {gpus}", f"{config.mesh.dp} x {config.mesh.tp}")
    last = (
        _collectives(checked),
        f"{program.layers} of {request.model.num_layers}",
        f"{program.compile_s:.0f}",
        "; ".join(sorted({finding.rule for finding in checked.findings})) or "none",
    )
    if checked.bucket is None:
        temporaries = f"{program.temporary_bytes / GB:.2f} ({memory.migration / GB:.2f})"
        return (*common, "both", "migration round", "", "", temporaries, "", *last)
    rows, tiles = checked.bucket
    places = f"{checked.kind}: {rows} rows" + (f", {tiles} tiles of {config.engine.tile}" if tiles else "")
    return (
        *common,
        config.engine.exchange,
        places,
        f"{memory.weights.total / GB:.1f}",
        f"{kv_tokens(config):,}",
        f"{program.temporary_bytes / GB:.2f} ({memory.step.total / GB:.2f})",
        f"{program.peak_bytes / GB:.1f} ({request.budget / GB:.1f})",
        *last,
    )


def table(rows: Sequence[tuple[str, ...]]) -> Table:
    """Return the rows as a table for a terminal."""
    drawn = Table()
    for column in COLUMNS:
        drawn.add_column(column)
    for line in rows:
        drawn.add_row(*line)
    return drawn


def _collectives(checked: Checked) -> str:
    """Return text such as ``all ranks: 96 all-gather, 48 reduce-scatter; each engine: 49 all-reduce``."""
    groups_of = mesh_groups(checked.config.mesh)
    # Where a single engine has all ranks, "all ranks" wins.
    names = {groups_of["tp"]: "each engine", groups_of["all"]: "all ranks"}
    kinds: dict[str, Counter[str]] = {}
    for (kind, _, _, groups), times in census(checked.program).items():
        kinds.setdefault(names.get(groups, str(groups)), Counter())[kind] += times
    return "; ".join(
        f"{among}: {', '.join(f'{times} {kind}' for kind, times in sorted(counted.items()))}"
        for among, counted in sorted(kinds.items())
    )
