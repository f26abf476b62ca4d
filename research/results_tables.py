"""Print the tables of research/results.md from the results of ``python -m research.reproduce``.

``--write`` writes them into the document, between the comments with their names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gimbal_jax.cli.terminal import report_errors
from research.experiments import MOST_SEEDS, Scope, quick
from research.reproduce import REPRODUCED
from research.store import ResultStore
from research.tables import all_tables
from scripts.cuda_document import write_section

DOCUMENT = Path(__file__).with_name("results.md")


def main(
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = REPRODUCED,
    seeds: Annotated[int, typer.Option(min=1, max=MOST_SEEDS, help="Seeds of the results.")] = Scope.seeds,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each run of the results.")] = Scope.requests,
    small: Annotated[bool, typer.Option("--quick", help="Show the results of `research.reproduce --quick`.")] = False,
    write: Annotated[bool, typer.Option(help=f"Write the tables into {DOCUMENT.name} instead.")] = False,
) -> None:
    """Print all tables as Markdown."""
    scope = Scope(requests, seeds)
    if small:
        scope, out = quick(scope), out / "quick"
    console = Console(markup=False, highlight=False, soft_wrap=True)
    with report_errors():
        store = ResultStore(out / "results.jsonl")
        for table in all_tables(store, scope):
            if write:
                write_section(table.name, table.markdown(), DOCUMENT)
            else:
                console.print(f"<!-- begin {table.name} -->\n{table.markdown()}<!-- end {table.name} -->\n")


if __name__ == "__main__":
    typer.run(main)
