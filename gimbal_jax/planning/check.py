"""A planned mesh, checked by compiling what its server would run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

from gimbal_jax.config import Exchange, MeshConfig, ServerConfig
from gimbal_jax.model.inputs import Bucket
from gimbal_jax.planning.checks import Census, Finding, census, migration_findings, step_findings
from gimbal_jax.planning.compiled import Program, StepKind, bucket_kinds, compile_migration, compile_step
from gimbal_jax.planning.plan import PlanRequest, Refused, fit_memory


@dataclass(frozen=True)
class Checked:
    """One program of a planned mesh."""

    config: ServerConfig
    """With the KV pool of the plan."""
    kind: StepKind | Literal["migration"]
    bucket: Bucket | None
    """(decode rows, prefill tiles); None for the migration."""
    program: Program
    findings: tuple[Finding, ...]

    @property
    def census(self) -> Census:
        return census(self.program)


def server_config(request: PlanRequest, mesh: MeshConfig) -> ServerConfig:
    """Settings with the KV pool that the plan claims. ValueError if the mesh does not serve the model."""
    fitted = fit_memory(request, mesh)
    if isinstance(fitted, Refused):
        raise ValueError(f"dp {mesh.dp} x tp {mesh.tp}: {fitted.reason}")
    _, kv_tokens = fitted
    engine = replace(request.engine, num_pages=kv_tokens // request.engine.page_size)
    return ServerConfig(mesh, engine, placement=request.placement)


def check_plan(
    request: PlanRequest,
    config: ServerConfig,
    *,
    exchanges: tuple[Exchange, ...] = ("gather", "sparse"),
    layers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Checked]:
    """Compile and check every kind of step by each exchange, and the migration.

    Args:
      request: model and GPUs.
      config: settings, from ``server_config``.
      exchanges: forms of the MoE exchange.
      layers: see ``compile_step``.
      progress: called with the number done and in all.
    """
    r = request

    def migration() -> Checked:
        program = compile_migration(r.model, config, r.gpu)
        return Checked(config, "migration", None, program, tuple(migration_findings(program, r.model, config)))

    def step(exchange: Exchange, kind: StepKind, bucket: Bucket) -> Checked:
        chosen = replace(config, engine=replace(config.engine, exchange=exchange))
        program = compile_step(r.model, chosen, r.gpu, bucket, layers)
        findings = step_findings(program, r.model, chosen, r.gpu, bucket, r.utilisation)
        return Checked(chosen, kind, bucket, program, tuple(findings))

    # XLA compiles outside the interpreter lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(migration)]
        for exchange in exchanges:
            jobs += [pool.submit(step, exchange, kind, bucket) for kind, bucket in bucket_kinds(config).items()]
        for done, job in enumerate(jobs, start=1):
            progress(done - 1, len(jobs))
            yield job.result()
        progress(len(jobs), len(jobs))
