"""The ``gimbal mesh`` commands: plan a mesh, check it by compiling for it, and show its parts."""

from __future__ import annotations

import json
import logging
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from gimbal_jax.cli.terminal import console, fail, print_table, progress_bar, report_errors
from gimbal_jax.config import (
    GPU_ENGINE,
    MEMORY_UTILISATION,
    Exchange,
    MeshConfig,
    PlacementConfig,
    PlacementPolicy,
)

if TYPE_CHECKING:
    from gimbal_jax.planning.plan import MeshPlan, PlanRequest, Rejected

mesh_app = typer.Typer(no_args_is_help=True, help="Plan a mesh of GPUs before renting one, and look into it.")

Model = Annotated[
    str,
    typer.Argument(help="Checkpoint folder, or a published model by name or hub id, such as Qwen3-30B-A3B."),
]
Gpus = Annotated[
    str,
    typer.Option(
        help="Number and kind: H100, H200, A100-80, B200 or L40S, as in 4xH100; with nodes before them, as in "
        "2x8xH100. 16xH100 is two nodes of eight, too."
    ),
]
Dp = Annotated[int, typer.Option(min=1, help="DP engines.")]
Tp = Annotated[int, typer.Option(min=1, help="Devices of each engine.")]
PageSize = Annotated[int, typer.Option(min=1, help="Tokens per KV page.")]
MaxRows = Annotated[int, typer.Option(min=1, help="Most sequences per engine at once.")]
TokenBudget = Annotated[int, typer.Option(min=1, help="Most tokens per engine and step.")]
Utilisation = Annotated[float, typer.Option(min=0.1, max=1, help="Share of each GPU's memory to use.")]
CHECKED_MODEL_LEN = 32768
"""Greatest length of the servers that `check` compiles: longer tables, and more that a dense copy would cost."""


@mesh_app.command()
def plan(
    model: Model,
    gpus: Gpus,
    link: Annotated[
        str | None, typer.Option(help="Network between several nodes: ib400, ib200, roce400, roce200 or eth100.")
    ] = None,
    page_size: PageSize = 64,
    max_rows: MaxRows = 128,
    token_budget: TokenBudget = 8192,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Most tokens per sequence; default 4096, or a longer request's.")
    ] = None,
    memory_utilisation: Utilisation = MEMORY_UTILISATION,
    request_tokens: Annotated[int, typer.Option(min=2, help="Tokens of a request, prompt and output.")] = 2000,
    output_tokens: Annotated[int, typer.Option(min=1, help="Output tokens among them.")] = 200,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"], typer.Option(help="Type of weights and cache; auto is the model's own.")
    ] = "auto",
    exchange: Annotated[Exchange, typer.Option(help="How tokens travel to experts.")] = "gather",
    placement: Annotated[
        PlacementPolicy, typer.Option(help="Placement policy; static needs no buffers for migration.")
    ] = PlacementConfig.policy,
    dp: Annotated[int | None, typer.Option(min=1, help="Only the mesh with this many engines.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Only the mesh with this many GPUs per engine.")] = None,
    command: Annotated[bool, typer.Option("--command", help="Print the `gimbal serve` command, nothing else.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """List every mesh of these GPUs for MODEL, with what fits and what it costs, and recommend one."""
    with report_errors():
        from gimbal_jax.planning import plan_report as report
        from gimbal_jax.planning.hardware import parse_gpus, parse_link
        from gimbal_jax.planning.models import find_model
        from gimbal_jax.planning.plan import PlanRequest, plan_meshes, recommended

        known = find_model(model)
        gpu, count, nodes = parse_gpus(gpus)
        network = parse_link(link, nodes)
        length = _model_len(max_model_len, request_tokens, known.config.max_position)
        engine = replace(
            GPU_ENGINE,
            max_model_len=length,
            page_size=page_size,
            max_rows=max_rows,
            token_budget=token_budget,
            exchange=exchange,
        )
        typed = known.config if dtype == "auto" else replace(known.config, dtype=dtype, weights_dtype=dtype)
        request = PlanRequest(
            typed,
            gpu,
            count,
            engine,
            memory_utilisation,
            request_tokens,
            output_tokens,
            PlacementConfig(policy=placement),
            nodes=nodes,
            link=network,
        )
        plans = _of_size(plan_meshes(request), dp, tp)
        best = recommended(plans)
        if command and best is not None:
            _print_commands(known.source, request, best)
        elif as_json:
            print(json.dumps(report.plan_json(known.name, request, plans), indent=2))
        elif not command:
            _print_plan(known.name, request, plans)
        if best is None:
            fail(report.nothing_fits(request, plans))


def _of_size(plans: Sequence[MeshPlan | Rejected], dp: int | None, tp: int | None) -> list[MeshPlan | Rejected]:
    """Return the plans with this dp and tp; None takes all. ValueError if there is none."""
    chosen = [one for one in plans if one.mesh.dp == (dp or one.mesh.dp) and one.mesh.tp == (tp or one.mesh.tp)]
    if not chosen:
        asked = f"--dp {dp}" * (dp is not None) + f" --tp {tp}" * (tp is not None)
        count = plans[0].mesh.ranks
        raise ValueError(f"{asked.strip()}: no mesh of {count} GPUs has it; dp * tp must be {count}")
    return chosen


def _model_len(asked: int | None, request_tokens: int, most: int) -> int:
    """Return the greatest sequence length of the planned server. ValueError if the model does not have it."""
    if request_tokens > most:
        raise ValueError(f"--request-tokens {request_tokens} is beyond the model's {most}")
    if asked is None:
        return max(request_tokens, min(GPU_ENGINE.max_model_len, most))
    if asked > most:
        raise ValueError(f"--max-model-len {asked} is beyond the model's {most} positions")
    return asked


def _print_commands(source: str, request: PlanRequest, best: MeshPlan) -> None:
    """Print the `gimbal serve` command of each node."""
    from gimbal_jax.planning.plan import COORDINATOR, SECRET_FILE, serve_commands

    commands = serve_commands(source, request, best.mesh)
    if len(commands) > 1:
        print(f"# one a node; replace {COORDINATOR} and {SECRET_FILE} by your own")
    for words in commands:
        print(shlex.join(words))


def _print_plan(name: str, request: PlanRequest, plans: Sequence[MeshPlan | Rejected]) -> None:
    """Print the table and its notes."""
    from gimbal_jax.planning import plan_report as report
    from gimbal_jax.planning.plan import recommended

    print(report.heading(name, request))
    if recommended(plans) is not None:
        print_table(report.plan_table(request, plans))
    width = Console().width
    for line in report.plan_lines(request, plans):
        print(textwrap.fill(line, width, subsequent_indent="  "))


@mesh_app.command()
def check(
    model: Model,
    gpus: Gpus,
    dp: Dp = 1,
    tp: Tp = 1,
    page_size: PageSize = 64,
    max_rows: MaxRows = 128,
    token_budget: TokenBudget = 8192,
    memory_utilisation: Utilisation = MEMORY_UTILISATION,
    layers: Annotated[int, typer.Option(min=0, help="Layers to compile; their sizes stand for all. 0: all.")] = 2,
) -> None:
    """Compile what a server of MODEL would run on this mesh, and check memory, collectives, donation and kernels.

    No GPU is needed, but XLA's CUDA compiler, and JAX_PLATFORMS=cpu: see docs/cuda.md.
    """
    with report_errors():
        from gimbal_jax.planning.check import check_plan, row, server_config, table
        from gimbal_jax.planning.hardware import parse_gpus
        from gimbal_jax.planning.models import find_model
        from gimbal_jax.planning.plan import PlanRequest

        known = find_model(model)
        name, architecture = known.name, known.config
        gpu, count, nodes = parse_gpus(gpus)
        if dp * tp != count:
            raise ValueError(f"--dp {dp} x --tp {tp} is {dp * tp} devices, and --gpus {gpus} has {count}")
        longest = min(CHECKED_MODEL_LEN, architecture.max_position)
        engine = replace(
            GPU_ENGINE, max_model_len=longest, page_size=page_size, max_rows=max_rows, token_budget=token_budget
        )
        request = PlanRequest(architecture, gpu, count, engine, memory_utilisation, nodes=nodes)
        config = server_config(request, MeshConfig(dp, tp, nodes))
        logging.getLogger("absl").setLevel(logging.ERROR)  # tokamax logs each shape that it has no tuning for
        with progress_bar(f"{name} on {gpus}, DP {dp} x TP {tp}") as progress:
            checked = list(check_plan(request, config, layers=layers or None, progress=progress))
        print_table(table([row(name, request, one) for one in checked]))
        findings = [f"{one.kind}: {finding}" for one in checked for finding in one.findings]
        for line in findings:
            console.print(line)
    raise typer.Exit(1 if findings else 0)


@mesh_app.command()
def show(
    model: Model,
    dp: Dp = 1,
    tp: Tp = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that the devices are spread over, in order.")] = 1,
    placement_file: Annotated[Path | None, typer.Option(help="Experts by this .npz file, else contiguous.")] = None,
    layer: Annotated[int, typer.Option(min=0, help="MoE layer, from 0, whose experts are shown.")] = 0,
    picture: Annotated[Path | None, typer.Option(help="File to write a picture of the mesh to.")] = None,
) -> None:
    """Show the part of MODEL that each device of a mesh holds."""
    with report_errors():
        from gimbal_jax.planning.models import find_model
        from gimbal_jax.planning.picture import draw_mesh
        from gimbal_jax.planning.show import shard_table, shards
        from gimbal_jax.scheduler.counts_file import load_placement_of
        from gimbal_jax.scheduler.placement import static_placement

        known = find_model(model)
        name, architecture = known.name, known.config
        mesh, layers = MeshConfig(dp, tp, nodes), len(architecture.moe_layers)
        if layer >= layers:
            raise ValueError(f"--layer {layer}: must be from 0 to {layers - 1}")
        if placement_file is None:
            slots_E = static_placement(1, architecture.num_experts, 1)[0]
        else:
            slots_E = load_placement_of(placement_file, architecture, mesh)[layer]
        held = shards(architecture, mesh, slots_E)
        over = f" over {nodes} nodes" if nodes > 1 else ""
        title = f"{name} on DP {dp} x TP {tp}{over}, experts of MoE layer {layer}"
        print_table(shard_table(title, held))
        if picture is not None:
            draw_mesh(title, architecture, held, picture)
            console.print(f"wrote {picture}")
