"""The ``gimbal`` command."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from gimbal_jax.cli.bench import bench
from gimbal_jax.cli.mesh import mesh_app
from gimbal_jax.cli.serve.command import fetch_checkpoint, serve
from gimbal_jax.cli.serve.options import DEVICES_HELP, DTYPE_HELP
from gimbal_jax.cli.simulate import simulate
from gimbal_jax.cli.terminal import console, errors_said, fail, print_table, progress_bar
from gimbal_jax.cli.top import top
from gimbal_jax.config import LoadTerm, MeshConfig, OfflinePolicy, PlacementConfig, PlacementPolicy
from gimbal_jax.serving.runtime.devices import load_on_mesh, set_up_devices

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Serve Qwen3-MoE models in JAX."
)
app.add_typer(mesh_app, name="mesh")
app.command()(serve)
app.command()(simulate)
app.command()(top)
app.command()(bench)

Devices = Annotated[str, typer.Option(help=DEVICES_HELP)]
Dtype = Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help=DTYPE_HELP)]
ALL_POLICIES: tuple[PlacementPolicy | OfflinePolicy, ...] = (*get_args(PlacementPolicy), *get_args(OfflinePolicy))


@app.command()
def counts(
    target: Annotated[str, typer.Option(help="HOST:PORT of a server.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.npz", help="File to write.")],
    total: Annotated[bool, typer.Option("--total", help="Traffic since the start, not of the last window.")] = False,
) -> None:
    """Fetch a server's traffic counts and placement into a counts file."""
    from gimbal_jax.client.client import GimbalClient
    from gimbal_jax.client.records import ClientError

    async def fetch() -> None:
        async with GimbalClient(target) as client:
            await client.save_counts(out, "total" if total else "window")

    with errors_said():
        try:
            asyncio.run(fetch())
        except ClientError as error:
            fail(f"{target}: {error}")
    console.print(f"wrote {out}")


@app.command()
def place(
    counts: Annotated[
        list[Path],
        typer.Option(help="Counts file (.npz), or a folder of them as `serve --dump-counts` writes; once for each."),
    ],
    policy: Annotated[
        list[str],
        typer.Option(help=f"Compare this one of {', '.join(ALL_POLICIES)}; give it once for each."),
    ] = ["gimbal", "gimbal_refined", "eplb"],  # noqa: B006 never changed
    compare: Annotated[Literal["exact"] | None, typer.Option(help="Solve exactly too, and compare with it.")] = None,
    window: Annotated[int | None, typer.Option(min=0, help="Window of the files, from 0; else all together.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Compare this many layers only, evenly spaced.")] = None,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds for a layer, for the exact solver.")] = 60.0,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that the ranks are on, evenly and in order.")] = 1,
    alpha: Annotated[float, typer.Option(min=0, help="Weight of communication.")] = PlacementConfig.alpha,
    beta: Annotated[float, typer.Option(min=0, help="Weight of uneven load.")] = PlacementConfig.beta,
    gamma: Annotated[float, typer.Option(min=0, help="Weight of moves.")] = PlacementConfig.gamma,
    load_term: Annotated[LoadTerm, typer.Option(help="How uneven load counts.")] = PlacementConfig.load_term,
    picture: Annotated[Path, typer.Option(help="Picture to write.")] = Path("out/place.png"),
    save: Annotated[
        Path | None, typer.Option(help="Write the last one's placement here, for `serve --placement-file`.")
    ] = None,
) -> None:
    """Compare placement policies on counted traffic, and with the exact answer."""
    with errors_said():
        from gimbal_jax.planning import placements as placing
        from gimbal_jax.scheduler.counts_file import save_placement

        file = placing.load_windows(counts)
        if window is not None:
            file = placing.one_window(file, window)
        config = PlacementConfig(alpha=alpha, beta=beta, gamma=gamma, load_term=load_term)
        if unknown := sorted({*policy} - {*ALL_POLICIES}):
            raise ValueError(f"--policy {unknown[0]}: must be one of {', '.join(ALL_POLICIES)}")
        policies = sorted((name for name in ALL_POLICIES if name in policy), key=policy.index)
        everywhere = [placing.policy_answer(name, file, config, nodes) for name in ("static", *policies)]
        if save is not None:
            slot_LE = everywhere[-1].slot_of_expert_LE
            save_placement(save, slot_LE, {"ranks": file.ranks, "policy": everywhere[-1].name})
        layer_L = placing.spaced_layers(file, layers)
        answers = [answer.of_layers(layer_L) for answer in everywhere]
        exact = None
        if compare == "exact":
            with progress_bar("solving") as progress:
                exact, solver = placing.exact_reference(answers[0], time_limit, progress)
            console.print(solver)
        for table in placing.tables(answers, layer_L, exact):
            print_table(table)
        picture.parent.mkdir(parents=True, exist_ok=True)
        placing.draw([*answers, *([exact] if exact else [])], layer_L, picture)
    console.print(f"wrote {picture}")


@app.command()
def demo_model(folder: Annotated[Path, typer.Argument(help="Folder to write, made if needed.")]) -> None:
    """Write a small Qwen3-MoE checkpoint with skewed routing, in Hugging Face's format."""
    from gimbal_jax.model.demo_model import write_demo_model

    with errors_said(), console.status("writing the demo model"):
        write_demo_model(folder)
    console.print(f"wrote {folder}; serve it with: gimbal serve {folder} --devices cpu:4 --dp 2 --tp 2")


@app.command()
def convert(
    model: Annotated[str, typer.Argument(help="Hugging Face checkpoint folder, or a hub id.")],
    target: Annotated[Path, typer.Argument(metavar="ORBAX_DIR", help="Folder to write.")],
    dp: Annotated[int, typer.Option(min=1, help="Mesh to read into, dp * tp devices.")] = 1,
    tp: Annotated[int, typer.Option(min=1, help="The result restores into any mesh.")] = 1,
    devices: Devices = "auto",
    dtype: Dtype = "auto",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
) -> None:
    """Convert a Hugging Face checkpoint to Orbax."""
    with errors_said():
        available = set_up_devices(devices, MeshConfig(dp, tp))
        from gimbal_jax.model.hf_config import load_config
        from gimbal_jax.model.orbax_checkpoint import check_target, is_orbax, save_orbax
        from gimbal_jax.model.sharding import check_mesh

        check_target(target)
        source = fetch_checkpoint(model, revision)
        if is_orbax(source):
            raise ValueError(f"{source} is an Orbax checkpoint already")
        config = load_config(source)
        check_mesh(config, MeshConfig(dp, tp))
        # Converting keeps the checkpoint's own type, also on CPU.
        wanted = config.dtype if dtype == "auto" else dtype
        with progress_bar("loading") as progress:
            weights, slots, _ = load_on_mesh(source, config, MeshConfig(dp, tp), available, wanted, progress)
        with console.status("writing the checkpoint"):
            save_orbax(target, source, weights, slots)
    console.print(f"wrote {target}")
