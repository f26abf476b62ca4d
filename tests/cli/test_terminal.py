"""Tables keep their numbers at any width; progress is a bar on a terminal and lines elsewhere."""

import time
from itertools import count

import pytest
import typer
from rich.table import Table

from gimbal_jax.cli.terminal import fail, print_table, progress_bar


@pytest.mark.parametrize("columns", [10, 80, 200])
def test_a_table_keeps_its_numbers_and_wraps_its_text(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    table = Table("what it is")
    table.add_column("KV tokens\nof engine", justify="right")
    table.add_row("words " * 10, "1,199,872")
    print_table(table)
    text = capsys.readouterr().out
    assert "1,199,872" in text and "…" not in text
    assert text.count("words") == 10
    assert max(map(len, text.splitlines())) <= max(columns, 30)


def test_without_a_terminal_progress_is_a_line_now_and_then(capsys):
    clock = count(0, 10).__next__  # each look at the clock is ten seconds later
    with progress_bar("compiling", clock=clock, line_s=0.05) as progress:
        progress(3, 9)
        printed = ""
        while not printed:
            time.sleep(0.01)
            printed = capsys.readouterr().err
        assert printed.startswith("compiling 3/9, 10 s\n")
        progress(9, 9)
    assert capsys.readouterr().err.splitlines()[-1].startswith("compiling 9/9, ")


def test_a_short_task_is_one_line(capsys):
    with progress_bar("loading", clock=lambda: 0.0) as progress:
        progress(1, 2)
        progress(2, 2)
    assert capsys.readouterr().err == "loading 2/2, 0 s\n"


def test_a_task_that_fails_ends_its_lines(capsys):
    with pytest.raises(KeyError), progress_bar("fetching", line_s=0.01) as progress:
        progress(0, 2)
        raise KeyError
    time.sleep(0.05)
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_the_error_is_the_last_line(capfd):
    print("a plan")
    with pytest.raises(typer.Exit):
        fail("it does not fit")
    assert capfd.readouterr().err == "error: it does not fit\n"
