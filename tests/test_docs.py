"""docs/: examples (scheduling.md, simulation.md) and commands (mesh.md) print what follows; links lead somewhere."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gimbal_jax.cli.main import app
from research.experiments import Scope
from research.results_tables import DOCUMENT
from research.store import ResultStore
from research.tables import all_tables

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = r"^```python\n(.*?)^```\n```text\n(.*?)^```$"
EXAMPLES = [
    pytest.param(*example, id=f"{path.name}-{number}")
    for path in (DOCS / "scheduling.md", DOCS / "simulation.md")
    for number, example in enumerate(re.findall(BLOCK, path.read_text(), re.MULTILINE | re.DOTALL))
]

COMMANDS = re.findall(BLOCK.replace("python", "sh"), (DOCS / "mesh.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("code", "output"), EXAMPLES)
def test_examples_print_what_they_say(code: str, output: str):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "example", "exec"), {})
    assert printed.getvalue() == output


@pytest.mark.parametrize(("command", "output"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_commands_of_mesh_print_what_they_say(command: str, output: str):
    program, *arguments = shlex.split(command)
    assert program == "gimbal"
    assert CliRunner().invoke(app, arguments, env={"COLUMNS": "100", "TERM": "dumb"}).output == output


@pytest.mark.parametrize(
    "path", [*sorted(DOCS.glob("*.md")), DOCUMENT], ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_links_lead_somewhere(path: Path):
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_every_table_of_results_has_its_place(tmp_path):
    found = re.findall(r"<!-- begin ([\w]+) -->\n", DOCUMENT.read_text())
    tables = all_tables(ResultStore(tmp_path / "results.jsonl"), Scope())
    assert sorted(found) == sorted(table.name for table in tables)
