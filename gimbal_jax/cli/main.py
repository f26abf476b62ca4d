"""The ``gimbal`` command."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import typer

from gimbal_jax.cli.bench import bench
from gimbal_jax.cli.mesh import mesh_app
from gimbal_jax.cli.place import place
from gimbal_jax.cli.serve.command import serve
from gimbal_jax.cli.serve.options import DEVICES_HELP, DTYPE_HELP
from gimbal_jax.cli.serve.setup import fetch_checkpoint
from gimbal_jax.cli.simulate import simulate
from gimbal_jax.cli.terminal import console, fail, progress_bar, report_errors
from gimbal_jax.cli.top import top
from gimbal_jax.config import MeshConfig
from gimbal_jax.serving.runtime.devices import load_on_mesh, set_up_devices

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Serve Qwen3-MoE models in JAX."
)
app.add_typer(mesh_app, name="mesh")
app.command()(serve)
app.command()(simulate)
app.command()(top)
app.command()(bench)
app.command()(place)

Devices = Annotated[str, typer.Option(help=DEVICES_HELP)]
Dtype = Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help=DTYPE_HELP)]


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

    with report_errors():
        try:
            asyncio.run(fetch())
        except ClientError as error:
            fail(f"{target}: {error}")
    console.print(f"wrote {out}")


@app.command()
def demo_model(folder: Annotated[Path, typer.Argument(help="Folder to write, made if needed.")]) -> None:
    """Write a small Qwen3-MoE checkpoint with skewed routing, in Hugging Face's format."""
    from gimbal_jax.model.demo_model import write_demo_model

    with report_errors(), console.status("writing the demo model"):
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
    with report_errors():
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
