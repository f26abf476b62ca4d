"""How commands speak: messages, progress and errors, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

# Messages hold paths and lists, so brackets are no markup. Each is one line, to be searched and copied.
console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar, moved by calling what this gives with (done, total)."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def errors_said() -> Iterator[None]:
    """Errors that the user can mend are one line, not a traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        fail(str(error))
    except RuntimeError as error:
        if "address" not in str(error).lower():  # gRPC's for a port that is taken
            raise
        fail(str(error))


def fail(message: str) -> NoReturn:
    """End the command with this error and exit code 2."""
    console.print(Text.assemble(("error: ", "red"), message))
    raise typer.Exit(2)
