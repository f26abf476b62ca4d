"""Messages, progress, errors and tables of the commands. Tables go to stdout, all else to stderr."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

# Messages contain paths and lists, so brackets are not markup. Each is one line, to be searched and copied.
console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)

LINE_S = 10.0
"""Seconds between two progress lines if stderr is not a terminal."""
WIDEST_TABLE = 10_000
"""Columns of a terminal that no table of ours needs."""


@contextmanager
def progress_bar(
    what: str, *, clock: Callable[[], float] = time.monotonic, line_s: float = LINE_S
) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of a task; yield the function to call with (done, total).

    A terminal shows a bar. A file or pipe gets a line every ``line_s`` seconds and one at the end.

    Args:
      what: name of the task.
      clock: seconds since any moment.
      line_s: seconds between two lines.
    """
    if not console.is_terminal:
        with _progress_lines(what, clock, line_s) as update:
            yield update
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def _progress_lines(what: str, clock: Callable[[], float], line_s: float) -> Iterator[Callable[[int, int], None]]:
    """Print lines as ``compiling 3/9, 20 s``, on a thread, because a single step may take minutes."""
    began, state, ended = clock(), "", threading.Event()

    def update(done: int, total: int) -> None:
        nonlocal state
        state = f" {done:,}/{total:,}"

    def line() -> None:
        console.print(f"{what}{state}, {clock() - began:.0f} s")

    def print_lines() -> None:
        while not ended.wait(line_s):
            line()

    thread = threading.Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield update
    finally:
        ended.set()
        thread.join()
    line()


def print_table(table: Table) -> None:
    """Print a table on stdout without cutting a number off, at any width.

    Columns that are justified to the right have numbers. They and those that do not wrap keep their full width, and the
    table is wider than the terminal if it must be.
    """
    out = Console()
    unlimited = out.options.update(max_width=WIDEST_TABLE)
    for column in table.columns:
        if column.justify == "right" or column.no_wrap:
            column.no_wrap = True
            column.min_width = max(
                Measurement.get(out, unlimited, cell).maximum for cell in (column.header, *column.cells)
            )
    least = Measurement.get(out, unlimited, table).minimum
    Console(width=max(out.width, least), highlight=False).print(table)


@contextmanager
def report_errors() -> Iterator[None]:
    """Print errors that the user can correct as one line, and end the command; other errors get a traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        fail(str(error))
    except RuntimeError as error:
        if "address" not in str(error).lower():  # gRPC's for a port in use
            raise
        fail(str(error))


def fail(message: str) -> NoReturn:
    """End the command with this error and exit code 2. The error is the last line, also if stdout is buffered."""
    sys.stdout.flush()
    console.print(Text.assemble(("error: ", "red"), message))
    raise typer.Exit(2)
