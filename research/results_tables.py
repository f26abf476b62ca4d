"""Prints the tables of docs/results.md from what research/reproduce.py found; --write puts them into the document."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gimbal_jax.cli.terminal import report_errors
from research import study_tables, tables
from research.experiments import MOST_SEEDS, Scope, quick
from research.reproduce import OUT
from research.store import ResultStore
from research.tables import Table
from scripts.cuda_document import write_section

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "results.md"
TABLES: dict[Callable[[ResultStore, Scope], Table], str] = {
    tables.verdicts_table: "8 9 10 11 12",
    tables.claims_table: "8 9 10 11 12",
    tables.systems_table: "8 9 11",
    tables.absolute_table: "9 11",
    tables.parts_table: "9",
    tables.outside_table: "9",
    tables.topics_table: "topics",
    tables.exchange_table: "exchange",
    tables.requests_table: "2",
    tables.traffic_table: "4",
    tables.calibration_table: "6",
    study_tables.late_table: "late",
    study_tables.budget_table: "budget",
    study_tables.queue_table: "queues",
    study_tables.replica_table: "replicas",
    study_tables.multihost_table: "multihost",
    study_tables.multihost_runs_table: "multihost",
    study_tables.pressure_table: "pressure",
    tables.work_table: "",
}
"""Each with the figures that it needs, as arguments of research/reproduce.py."""


def section(table: Table, figures: str) -> str:
    """What stands between the comments of a table."""
    return f"`{' '.join(['python -m research.reproduce', *figures.split()])}`. {table.markdown()}"


def main(
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = OUT,
    seeds: Annotated[int, typer.Option(min=1, max=MOST_SEEDS, help="As the results were made with.")] = Scope.seeds,
    requests: Annotated[int, typer.Option(min=1, help="As the results were made with.")] = Scope.requests,
    small: Annotated[bool, typer.Option("--quick", help="As the results were made with.")] = False,
    write: Annotated[
        bool, typer.Option(help=f"Put them into {DOCUMENT.name}, between the comments that are there.")
    ] = False,
) -> None:
    """All tables, as Markdown."""
    scope = Scope(requests, seeds)
    if small:
        scope, out = quick(scope), out / "quick"
    console = Console(markup=False, highlight=False, soft_wrap=True)
    with report_errors():
        store = ResultStore(out / "results.jsonl")
        for make, figures in TABLES.items():
            table = make(store, scope)
            if write:
                write_section(table.name, section(table, figures), DOCUMENT)
            else:
                console.print(f"<!-- begin {table.name} -->\n{section(table, figures)}<!-- end {table.name} -->\n")


if __name__ == "__main__":
    typer.run(main)
