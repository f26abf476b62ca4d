"""The ``gimbal place`` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from gimbal_jax.cli.terminal import console, print_table, progress_bar, report_errors
from gimbal_jax.config import LoadTerm, OfflinePolicy, PlacementConfig, PlacementPolicy

ALL_POLICIES: tuple[PlacementPolicy | OfflinePolicy, ...] = (*get_args(PlacementPolicy), *get_args(OfflinePolicy))


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
    window: Annotated[
        int | None, typer.Option(min=0, help="Window of the files, from 0; default all together.")
    ] = None,
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
    with report_errors():
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
