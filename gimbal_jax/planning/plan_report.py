"""A plan as a table with its reasons, or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from gimbal_jax.model.memory import GB, kv_bytes_per_token
from gimbal_jax.model.sizes import expert_bytes
from gimbal_jax.planning.cost import exchange_bytes, migration_cost, remote_ranks
from gimbal_jax.planning.plan import CLOSE, MeshPlan, PlanRequest, Refused, recommended, smallest_count


def heading(name: str, request: PlanRequest) -> str:
    """The request in a line."""
    r, memory = request, request.gpu.memory_bytes / GB
    return (
        f"{name} ({r.model.dtype}) on {r.count} x {r.gpu.name}, {r.utilisation:.0%} of {memory:.1f} GB each. "
        "Estimated, not measured."
    )


def plan_table(request: PlanRequest, plans: Sequence[MeshPlan | Refused]) -> Table:
    """The meshes that fit, one a row."""
    engine, best = request.engine, recommended(plans)
    table = Table(
        title=f"Each engine: {engine.max_rows} rows, {engine.token_budget:,} tokens a step, pages of {engine.page_size}"
    )
    table.add_column("DP x TP")
    columns = ["weights\nGB/GPU", "a step\nGB/GPU", "KV tokens\nper engine", "requests\nin caches"]
    for column in [*columns, "prefill\nms", "decode\nms", "requests\nper s"]:
        table.add_column(column, justify="right")
    for plan in plans:
        if isinstance(plan, MeshPlan):
            table.add_row(
                f"{plan.mesh.dp} x {plan.mesh.tp}" + (" *" if plan == best else ""),
                f"{plan.memory.weights.total / GB:.1f}",
                f"{plan.memory.step.total / GB:.1f}",
                f"{plan.kv_tokens:,}",
                f"{plan.concurrent:,}",
                f"{plan.prefill_seconds * 1e3:.1f}",
                f"{plan.decode_seconds * 1e3:.2f}",
                f"{plan.requests_per_second:.1f}",
            )
    return table


def plan_lines(request: PlanRequest, plans: Sequence[MeshPlan | Refused]) -> list[str]:
    """What a reader needs beside the table, and the recommendation with its reason."""
    r, model, ranks = request, request.model, request.count
    lines = [f"DP {p.mesh.dp} x TP {p.mesh.tp}: {p.reason}" for p in plans if isinstance(p, Refused)]
    best = recommended(plans)
    if best is None:
        return lines
    rows = min(r.engine.max_rows, max(1, best.concurrent))
    lines.append(
        f"Requests: {r.request_tokens:,} tokens each, {r.output_tokens:,} of them output; their cache takes "
        f"{r.request_tokens * kv_bytes_per_token(model) / 2**20:.1f} MiB."
    )
    lines.append(
        f"Floors by data sheets: a prefill step of {r.engine.token_budget:,} tokens, a decode step of {rows} requests, "
        f"over all engines, exchange {r.engine.exchange}; requests per s from both."
    )
    if ranks > 1:
        lines += _traffic_lines(request, plans)
    return [*lines, *_recommendation(plans, best)]


def _traffic_lines(request: PlanRequest, plans: Sequence[MeshPlan | Refused]) -> list[str]:
    r, model, ranks = request, request.model, request.count
    gather, sparse = (exchange_bytes(model, ranks, form) / 1e3 for form in ("gather", "sparse"))
    within = ", ".join(
        f"{p.tensor_parallel_bytes / 1e3:.1f} at TP {p.mesh.tp}" for p in plans if isinstance(p, MeshPlan)
    )
    cost = migration_cost(model, ranks, r.gpu, r.placement)
    return [
        f"Over links, for a token in one layer: exchange {gather:.1f} kB by gather, {sparse:.1f} kB by sparse (uniform "
        f"routing: to {remote_ranks(model, ranks, 'sparse'):.2f} of {ranks - 1} other GPUs); within its "
        f"engine {within} kB.",
        f"Migration: an expert is {expert_bytes(model) / 1e6:.1f} MB; at most {cost.step_bytes / 1e6:,.0f} MB move "
        f"between two steps, {cost.step_seconds * 1e3:.2f} ms on the links. A layer whose GPUs all pass their experts "
        f"on takes {cost.layer_steps} steps, {cost.layer_seconds * 1e3:.2f} ms.",
    ]


def _recommendation(plans: Sequence[MeshPlan | Refused], best: MeshPlan) -> list[str]:
    others = [plan for plan in plans if isinstance(plan, MeshPlan) and plan != best]
    text = f"Recommended: DP {best.mesh.dp} x TP {best.mesh.tp}"
    if not others:
        return [f"{text}, the only mesh that fits."]
    lines = [f"{text}: of the meshes within {CLOSE:.0%} of the best rate its caches hold most requests."]
    for plan in others:
        changes = (
            f"{plan.requests_per_second / best.requests_per_second - 1:+.0%} rate",
            f"{plan.concurrent / best.concurrent - 1:+.0%} requests in caches" if best.concurrent else "",
            f"{plan.prefill_seconds / best.prefill_seconds - 1:+.0%} prefill time",
            f"{plan.decode_seconds / best.decode_seconds - 1:+.0%} decode time",
        )
        lines.append(f"  against it DP {plan.mesh.dp} x TP {plan.mesh.tp}: {', '.join(filter(None, changes))}")
    if best.mesh.dp == 1:
        lines.append("  With one engine dispatch has nothing to choose; placement only evens out the load.")
    return lines


def plan_json(name: str, request: PlanRequest, plans: Sequence[MeshPlan | Refused]) -> dict[str, Any]:
    """The same for programs; bytes, seconds and counts without units in the text."""
    best = recommended(plans)
    ranks = request.count
    return {
        "model": name,
        "gpu": request.gpu.name,
        "gpus": ranks,
        "estimated": True,
        "engine": asdict(request.engine),
        "plans": [asdict(plan) for plan in plans if isinstance(plan, MeshPlan)],
        "refused": [asdict(plan) for plan in plans if isinstance(plan, Refused)],
        "exchange_bytes": {form: exchange_bytes(request.model, ranks, form) for form in ("gather", "sparse")},
        "migration": asdict(migration_cost(request.model, ranks, request.gpu, request.placement)),
        "recommended": asdict(best.mesh) if best else None,
    }


def nothing_fits(request: PlanRequest, plans: Sequence[MeshPlan | Refused]) -> str:
    """Why no mesh serves the model, by how much memory, and how many GPUs would."""
    missing = [plan.missing_bytes for plan in plans if isinstance(plan, Refused) and plan.missing_bytes]
    why = f"{min(missing) / GB:.1f} GB per GPU are missing" if missing else "every mesh breaks a rule, see above"
    count = smallest_count(request)
    least = f"the fewest that would is {count}" if count else "no number of them would"
    return f"no mesh of {request.count} x {request.gpu.name} serves the model: {why}; {least}"
