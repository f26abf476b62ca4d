"""Checked programs as the rows of a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from gimbal_jax.model.memory import GB, device_bytes
from gimbal_jax.planning.check import Checked
from gimbal_jax.planning.checks import kv_tokens, mesh_groups
from gimbal_jax.planning.plan import PlanRequest

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


def row(name: str, request: PlanRequest, checked: Checked) -> tuple[str, ...]:
    """Cells of one program."""
    config, program = checked.config, checked.program
    memory = device_bytes(request.model, config, checked.bucket or (0, 0), request.gpu.backend)
    gpus = f"{request.nodes}x" * (request.nodes > 1) + f"{request.per_node}x{request.gpu.name}"
    common = (f"{name}, {gpus}", f"{config.mesh.dp} x {config.mesh.tp}")
    last = (
        _collectives(checked),
        f"{program.layers} of {request.model.num_layers}",
        f"{program.compile_s:.0f}",
        _verdict(checked),
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
    """The table for a terminal."""
    drawn = Table()
    for column in COLUMNS:
        drawn.add_column(column)
    for line in rows:
        drawn.add_row(*line)
    return drawn


def _collectives(checked: Checked) -> str:
    """As ``all ranks: 96 all-gather, 48 reduce-scatter; each engine: 49 all-reduce``."""
    mesh = checked.config.mesh
    names = {mesh_groups(mesh)["tp"]: "each engine", mesh_groups(mesh)["all"]: "all ranks"}
    kinds: dict[str, Counter[str]] = {}
    for (kind, _, _, groups), times in checked.census.items():
        kinds.setdefault(names.get(groups, str(groups)), Counter())[kind] += times
    return "; ".join(
        f"{among}: {', '.join(f'{times} {kind}' for kind, times in sorted(counted.items()))}"
        for among, counted in sorted(kinds.items())
    )


def _verdict(checked: Checked) -> str:
    return "; ".join(sorted({finding.rule for finding in checked.findings})) or "none"
