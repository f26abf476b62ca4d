"""A plan as a table with its reasons, or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from gimbal_jax.config import Exchange
from gimbal_jax.model.memory import GB, kv_bytes_per_token
from gimbal_jax.model.sizes import expert_bytes
from gimbal_jax.planning.cost import (
    WAITS,
    MigrationCost,
    exchange_bytes,
    far_copies,
    far_exchange_bytes,
    migration_cost,
    remote_ranks,
)
from gimbal_jax.planning.plan import CLOSE, MeshPlan, PlanRequest, Rejected, recommended, smallest_count


def heading(name: str, request: PlanRequest) -> str:
    """Describe the request in a line."""
    r, memory = request, request.gpu.memory_bytes / GB
    network = f" over {r.link.name}" if r.link else ""
    return (
        f"{name} ({r.model.dtype}) on {_gpus(r)}{network}, {r.utilisation:.0%} of {memory:.1f} GB each. "
        "Estimated, not measured."
    )


def _gpus(request: PlanRequest) -> str:
    nodes = f"{request.nodes} nodes of " if request.nodes > 1 else ""
    return f"{nodes}{request.per_node} x {request.gpu.name}"


def plan_table(request: PlanRequest, plans: Sequence[MeshPlan | Rejected]) -> Table:
    """Return the meshes that fit as a table, one a row. It is at most 80 characters wide up to 99 engines."""
    engine, best = request.engine, recommended(plans)
    table = Table(
        title=f"Each engine: {engine.max_rows} rows, {engine.token_budget:,} tokens a step, "
        f"pages of {engine.page_size}; GB per GPU",
        box=box.HORIZONTALS,
        padding=0,
    )
    table.add_column("DP x TP", no_wrap=True)
    columns = ["weights\nGB", "step\nGB", "moves\nGB", "KV tokens\nof engine", "requests\nin cache"]
    columns += ["network\nMB/GPU"] * (request.nodes > 1)
    for column in [*columns, "prefill\nms", "decode\nms", "requests\nper s"]:
        table.add_column(column, justify="right")
    prefill_tokens = engine.token_budget * len(request.model.moe_layers) / request.count
    for plan in plans:
        if isinstance(plan, MeshPlan):
            table.add_row(
                f"{plan.mesh.dp} x {plan.mesh.tp}" + (" *" if plan == best else ""),
                f"{plan.memory.weights.total / GB:.1f}",
                f"{plan.memory.step.total / GB:.1f}",
                f"{plan.memory.migration / GB:.1f}",
                f"{plan.kv_tokens:,}",
                f"{plan.concurrent:,}",
                *[f"{plan.far_bytes * prefill_tokens / 1e6:,.0f}"] * (request.nodes > 1),
                f"{plan.prefill_seconds * 1e3:.1f}",
                f"{plan.decode_seconds * 1e3:.2f}",
                f"{plan.requests_per_second:.1f}",
            )
    return table


def plan_lines(request: PlanRequest, plans: Sequence[MeshPlan | Rejected]) -> list[str]:
    """Return the notes below the table, and the recommendation with its reason."""
    r, model, ranks = request, request.model, request.count
    lines = list(_rejections(plans))
    best = recommended(plans)
    if best is None:
        return lines
    lines.append(
        f"Requests: {r.request_tokens:,} tokens each, {r.output_tokens:,} of them output; their cache takes "
        f"{r.request_tokens * kv_bytes_per_token(model) / 2**20:.1f} MiB."
    )
    lines.append(
        f"Floors by data sheets: a prefill step of {r.engine.token_budget:,} tokens, a decode step of "
        f"{r.engine.max_rows} requests{_fewer(r, plans)}, over all engines, exchange {r.engine.exchange}; "
        "requests per s from both."
    )
    if ranks > 1:
        lines += _traffic_lines(request, plans)
    return [*lines, *_recommendation(plans, best)]


def _rejections(plans: Sequence[MeshPlan | Rejected]) -> Iterator[str]:
    """A line for each reason, with all meshes that it rejects."""
    meshes: dict[str, list[str]] = {}
    for plan in plans:
        if isinstance(plan, Rejected):
            meshes.setdefault(plan.reason, []).append(f"DP {plan.mesh.dp} x TP {plan.mesh.tp}")
    for reason, rejected in meshes.items():
        yield f"{', '.join(rejected)}: {reason}"


def _fewer(request: PlanRequest, plans: Sequence[MeshPlan | Rejected]) -> str:
    """Name the meshes whose caches hold fewer requests than a decode step has rows."""
    fewer = [
        f"{p.decode_requests} at DP {p.mesh.dp} x TP {p.mesh.tp}"
        for p in plans
        if isinstance(p, MeshPlan) and p.decode_requests < request.engine.max_rows
    ]
    return f" ({', '.join(fewer)}, as the caches hold)" if fewer else ""


def _traffic_lines(request: PlanRequest, plans: Sequence[MeshPlan | Rejected]) -> list[str]:
    r, model, ranks = request, request.model, request.count
    gather, sparse = (exchange_bytes(model, ranks, form) / 1e3 for form in ("gather", "sparse"))
    within = ", ".join(
        f"{p.tensor_parallel_bytes / 1e3:.1f} at TP {p.mesh.tp}" for p in plans if isinstance(p, MeshPlan)
    )
    return [
        f"Over links, for a token in one layer: exchange {gather:.1f} kB by gather, {sparse:.1f} kB by sparse (uniform "
        f"routing: to {remote_ranks(model, ranks, 'sparse'):.2f} of {ranks - 1} other GPUs); within its "
        f"engine {within} kB.",
        *_network_lines(r),
        _migration_line(r),
    ]


def _network_lines(request: PlanRequest) -> list[str]:
    r, model, sizes = request, request.model, (request.count, request.nodes)
    if r.link is None:
        return []
    gather, sparse = (far_exchange_bytes(model, *sizes, form) / 1e3 for form in ("gather", "sparse"))
    return [
        f"Across nodes, of the exchange: {gather:.1f} kB by gather (once to each other node), {sparse:.1f} kB by "
        f"sparse (to {far_copies(model, *sizes, 'sparse'):.2f} of {r.count - r.per_node} GPUs there), over "
        f"{r.link.description}. The network column is the traffic of each GPU to other nodes in the prefill step. It "
        f"runs in parallel with the traffic within nodes, so the longer of the two counts, with "
        f"{WAITS[r.engine.exchange]} x {r.link.latency_s * 1e6:g} us a layer.",
    ]


def _migration_line(request: PlanRequest) -> str:
    r, cost = request, _migration(request)
    if r.placement.policy == "static":
        return "Migration: none under static placement, which needs no buffers for moves."
    if r.nodes > 1:
        steps = f"{cost.layer_steps} such step" + "s" * (cost.layer_steps > 1)
        across = f", {cost.far_step_bytes / 1e6:,.0f} MB of it across nodes"
        buffers = " even if few of them move"
    else:
        steps = f"{cost.layer_steps} steps, {cost.layer_seconds * 1e3:.2f} ms"
        across = buffers = ""
    return (
        f"Migration: an expert is {expert_bytes(r.model) / 1e6:.1f} MB; at most {cost.step_bytes / 1e6:,.0f} MB move "
        f"between two steps{across}, {cost.step_seconds * 1e3:.2f} ms on the links{buffers}. A layer in which every "
        f"GPU passes all its experts on takes {steps}. The moves column is the buffers of "
        f"{r.placement.rows_per_pair} experts to and from every GPU; --placement static needs none."
    )


def _migration(request: PlanRequest) -> MigrationCost:
    r = request
    return migration_cost(r.model, r.count, r.gpu, r.placement, r.nodes, r.link)


def _recommendation(plans: Sequence[MeshPlan | Rejected], best: MeshPlan) -> list[str]:
    others = [plan for plan in plans if isinstance(plan, MeshPlan) and plan != best]
    text = f"Recommended: DP {best.mesh.dp} x TP {best.mesh.tp}"
    if not others:
        return [f"{text}, the only mesh that fits."]
    lines = [f"{text}: of the meshes within {CLOSE:.0%} of the best rate its caches hold most requests."]
    for plan in others:
        batch = f" ({plan.decode_requests} requests, not {best.decode_requests})"
        changes = (
            f"{plan.requests_per_second / best.requests_per_second - 1:+.0%} rate",
            f"{plan.concurrent / best.concurrent - 1:+.0%} requests in caches" if best.concurrent else "",
            f"{plan.prefill_seconds / best.prefill_seconds - 1:+.0%} prefill time",
            f"{plan.decode_seconds / best.decode_seconds - 1:+.0%} decode time"
            + batch * (plan.decode_requests != best.decode_requests),
        )
        lines.append(f"  against it DP {plan.mesh.dp} x TP {plan.mesh.tp}: {', '.join(filter(None, changes))}")
    if best.mesh.dp == 1:
        lines.append("  With one engine dispatch has nothing to choose; placement only evens out the load.")
    return lines


def plan_json(name: str, request: PlanRequest, plans: Sequence[MeshPlan | Rejected]) -> dict[str, Any]:
    """Return the plan for programs: bytes, seconds and counts as numbers."""
    best = recommended(plans)
    model, ranks = request.model, request.count
    forms: tuple[Exchange, ...] = ("gather", "sparse")
    return {
        "model": name,
        "gpu": request.gpu.name,
        "gpus": ranks,
        "nodes": request.nodes,
        "link": asdict(request.link) if request.link else None,
        "estimated": True,
        "engine": asdict(request.engine),
        "plans": [asdict(plan) for plan in plans if isinstance(plan, MeshPlan)],
        "rejected": [asdict(plan) for plan in plans if isinstance(plan, Rejected)],
        "exchange_bytes": {form: exchange_bytes(model, ranks, form) for form in forms},
        "far_exchange_bytes": {form: far_exchange_bytes(model, ranks, request.nodes, form) for form in forms},
        "migration": asdict(_migration(request)),
        "recommended": asdict(best.mesh) if best else None,
    }


def nothing_fits(request: PlanRequest, plans: Sequence[MeshPlan | Rejected]) -> str:
    """Explain that no mesh serves the model: the memory that each GPU lacks, and the number of GPUs that would."""
    missing = [plan.missing_bytes for plan in plans if isinstance(plan, Rejected) and plan.missing_bytes]
    why = f"{min(missing) / GB:.1f} GB per GPU are missing" if missing else "every mesh breaks a rule, see above"
    match smallest_count(request):
        case None:
            least = "no number of them would"
        case count, 1:
            least = f"the fewest that would is {count}"
        case count, nodes:
            least = f"the fewest that would is {count} ({nodes} nodes of {count // nodes})"
    return f"no mesh of {_gpus(request)} serves the model: {why}; {least}"
