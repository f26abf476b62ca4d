"""Reproduce the paper's figures 2 to 12, and our studies, by simulation: `python -m research.reproduce`.

Each result is written immediately to results.jsonl in the folder of --out and is not computed again. The command can be
stopped at any time, and the next call continues. Results depend on the code, so after a change of the simulator use
another folder. Pictures are drawn at the end. `python -m research.results_tables` prints all tables.
`python -m research.collection_overhead` measures figure 13, the cost of counting, which is not simulated.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from gimbal_jax.cli.terminal import console, fail, report_errors
from gimbal_jax.config import PlacementConfig
from research.calibrate_placement import compare, synthetic
from research.experiments import MOST_SEEDS, Experiment, Scope, experiments, in_order, quick
from research.figures import draw_figures
from research.store import OUT, ResultStore
from research.tables import verdicts_table
from research.tasks import CalibrationPoint, Task, at_capacity, capacity_task, run_task

REPRODUCED = OUT / "reproduce"
SHOWN_ERRORS = 10


def compute(task: Task) -> dict[str, Any]:
    """Compute a task in a worker, and add its seconds on this machine (``wall_s``)."""
    began = time.monotonic()
    result = calibration_point(task) if isinstance(task, CalibrationPoint) else run_task(task)
    return {**result, "wall_s": time.monotonic() - began}


def calibration_point(task: CalibrationPoint) -> dict[str, Any]:
    """Compare the answers of each policy with the exact ones."""
    windows = synthetic(task.windows).sample(task.windows)
    config = PlacementConfig(alpha=1.0, beta=task.beta, gamma=task.gamma)
    return dict(compare(windows, config, task.time_limit_s, task.gap).policies)


def compute_all(tasks: Sequence[Task], store: ResultStore, jobs: int) -> list[str]:
    """Put the results of all tasks into the store, and return the errors."""
    capacities = list(dict.fromkeys(found for task in tasks if (found := capacity_task(task)) is not None))
    errors = compute_missing(capacities, store, jobs, "capacities", lambda task: task)

    def at_rate(task: Task) -> Task:
        found = capacity_task(task)
        return task if found is None else at_capacity(task, store[found]["requests_per_s"])

    ready = [task for task in tasks if (found := capacity_task(task)) is None or found in store]
    return errors + compute_missing(ready, store, jobs, "runs", at_rate)


def compute_missing(
    tasks: Sequence[Task], store: ResultStore, jobs: int, what: str, prepare: Callable[[Task], Task]
) -> list[str]:
    """Compute the tasks that the store lacks, and return the errors.

    On Ctrl-C no task is started any more, and the running ones are finished and kept.
    """
    missing = [task for task in tasks if task not in store]
    if not missing:
        return []
    errors: list[str] = []

    def keep(future: Future[dict[str, Any]]) -> None:
        if (error := future.exception()) is None:
            store.add(waiting[future], future.result())
        else:
            errors.append(f"{waiting[future]}: {error}")
        del waiting[future]

    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # for the workers; more threads would only wait for each other
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=ignore_interrupts) as pool:
        waiting = {pool.submit(compute, prepare(task)): task for task in missing}
        with Progress(*columns, console=console, speed_estimate_period=300) as progress:
            try:
                for future in progress.track(as_completed(list(waiting)), total=len(waiting)):
                    keep(future)
            except KeyboardInterrupt:
                console.print("stopping after the running tasks, whose results are kept (a few seconds)")
                for future in as_completed([future for future in waiting if not future.cancel()]):
                    keep(future)
                raise
    return errors


def ignore_interrupts() -> None:
    """Ignore Ctrl-C in a worker. The parent process handles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def overview(found: dict[str, Experiment], store: ResultStore) -> Table:
    """Return a table of the experiments with the number of their runs, and of those that are done."""
    table = Table("name", "what", title="Figures of the paper, and studies")
    for column in ("runs", "done"):
        table.add_column(column, justify="right")
    for name, experiment in found.items():
        tasks = set(experiment.tasks)
        done = sum(task in store for task in tasks)
        table.add_row(name, experiment.about, str(len(tasks)), "all" if done == len(tasks) else str(done))
    table.add_row("13", "cost of counting, measured: python -m research.collection_overhead", "", "")
    return table


def main(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[FIGURE]...", help="Names as in --list. By default all.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Concurrent runs, each in a process.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder for results and pictures.")] = REPRODUCED,
    seeds: Annotated[
        int, typer.Option(min=1, max=MOST_SEEDS, help="Seeds of each setting. Can be raised later.")
    ] = Scope.seeds,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each run.")] = Scope.requests,
    small: Annotated[bool, typer.Option("--quick", help="Run a small part in minutes, in its own folder.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the figures and how much of each is done.")] = False,
) -> None:
    """Compute the missing results, and draw the pictures."""
    scope = Scope(requests, seeds)
    if small:
        scope, out = quick(scope), out / "quick"
    known = experiments(scope)
    if unknown := [name for name in names or () if name not in known]:
        fail(f"figure {unknown[0]}: must be one of {', '.join(known)}")
    with report_errors():
        store = ResultStore(out / "results.jsonl")
    if listed:
        console.print(overview(known, store))
        return
    chosen = {name: known[name] for name in names or known}
    began = time.monotonic()
    errors = compute_all(in_order(chosen.values(), scope), store, jobs)
    for path in draw_figures(store, scope, tuple(chosen), out):
        console.print(f"drew {path}")
    console.print(verdicts_table(store, scope).rich())
    for error in errors[:SHOWN_ERRORS]:
        console.print(f"failed: {error}")
    if len(errors) > SHOWN_ERRORS:
        console.print(f"failed: {len(errors) - SHOWN_ERRORS} more")
    console.print(f"{len(store):,} results in {store.path}; this took {(time.monotonic() - began) / 60:.1f} minutes")
    if errors:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
