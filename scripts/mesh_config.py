"""Plan meshes in Python, choose one by your own rule, and write the file for `gimbal serve --config`.

Edit ``choose`` to change the rule. It gets every mesh of every offer that fits the model, with all values of
``gimbal_jax.planning.plan.MeshPlan``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from gimbal_jax.cli.serve.options import ServeOptions
from gimbal_jax.cli.serve.toml_file import to_toml
from gimbal_jax.cli.terminal import console, report_errors
from gimbal_jax.config import GPU_ENGINE
from gimbal_jax.planning.hardware import parse_gpus, parse_link
from gimbal_jax.planning.models import find_model
from gimbal_jax.planning.plan import MeshPlan, PlanRequest, plan_meshes, serve_settings

OFFERS = ("1xH100", "2xH100", "4xH100", "8xH100")


@dataclass(frozen=True)
class Candidate:
    """One mesh of one offer."""

    gpus: str
    request: PlanRequest
    plan: MeshPlan


def choose(candidates: list[Candidate], rate: float) -> Candidate:
    """Choose the fewest GPUs that reach the rate, then the mesh whose KV caches hold the most requests.

    Other rules: ``max(candidates, key=lambda c: c.plan.concurrent)`` chooses the most requests in caches, and
    ``min(candidates, key=lambda c: c.plan.decode_seconds)`` chooses the shortest time per token. Raises ValueError if
    no mesh reaches the rate.
    """
    enough = [c for c in candidates if c.plan.requests_per_second >= rate]
    if not enough:
        best = max(c.plan.requests_per_second for c in candidates)
        raise ValueError(f"--rate {rate:g}: no mesh of these offers reaches it. The best has {best:.1f} requests per s")
    return min(enough, key=lambda c: (c.request.count, -c.plan.concurrent))


def candidates_of(model: str, offers: list[str], link: str | None) -> list[Candidate]:
    """Return every mesh that fits. Raises ValueError for an unknown model, GPU or link, or if none fits."""
    found = []
    for gpus in offers:
        gpu, count, nodes = parse_gpus(gpus)
        network = parse_link(link, nodes) if nodes > 1 else None
        request = PlanRequest(find_model(model).config, gpu, count, GPU_ENGINE, nodes=nodes, link=network)
        plans = [plan for plan in plan_meshes(request) if isinstance(plan, MeshPlan)]
        found += [Candidate(gpus, request, plan) for plan in plans]
    if not found:
        raise ValueError(f"--gpus {', '.join(offers)}: no mesh of these offers serves {model}")
    return found


def main(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or name or hub id of a published model.")],
    gpus: Annotated[list[str], typer.Option(help="An offer, for example 4xH100. Repeatable.")] = list(OFFERS),  # noqa: B006 never changed
    link: Annotated[str | None, typer.Option(help="Network of offers with several nodes, for example ib400.")] = None,
    rate: Annotated[float, typer.Option(help="Requests per second that the mesh must reach.")] = 20.0,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("out/serve.toml"),
) -> None:
    with report_errors():
        chosen = choose(candidates_of(model, gpus, link), rate)
        settings: dict[str, Any] = serve_settings(chosen.request, chosen.plan.mesh)
        fields = {key.replace("-", "_"): value for key, value in settings.items()}
        options = ServeOptions(find_model(model).source, **fields, placement=chosen.request.placement)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(to_toml(options), encoding="utf-8")
    mesh, plan = chosen.plan.mesh, chosen.plan
    console.print(
        f"{chosen.gpus}, DP {mesh.dp} x TP {mesh.tp}: {plan.requests_per_second:.1f} requests per s (estimated)"
    )
    console.print(f"wrote {out}; serve it with: gimbal serve --config {out}")


if __name__ == "__main__":
    typer.run(main)
