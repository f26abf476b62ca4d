"""docs/ is true: examples and commands print what follows, links lead somewhere, quoted messages are in the code."""

import ast
import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import grpc
import pytest
from typer.testing import CliRunner

from gimbal_jax.cli.main import app
from gimbal_jax.config import DispatchPolicy, PlacementPolicy, QueuePolicy
from gimbal_jax.exceptions import GenerationFailed, NotServing
from gimbal_jax.serving.rpc.calls import STATUS_CODES
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


ROOT = DOCS.parent
PAGES = sorted(path for folder in (".", "docs", "deploy", "research", "tests") for path in (ROOT / folder).glob("*.md"))
STATUS = rf"\b(?:{'|'.join(code.name for code in grpc.StatusCode)})\b"


def messages(source: str) -> Iterator[str]:
    """Yield the strings of a program, with "..." for each value of an f-string."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


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


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path):
    for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", path.read_text()):
        page = path.parent / target if target else path
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), f"{target}#{anchor}"


def test_every_table_of_results_has_its_place(tmp_path):
    found = re.findall(r"<!-- begin ([\w]+) -->\n", DOCUMENT.read_text())
    tables = all_tables(ResultStore(tmp_path / "results.jsonl"), Scope())
    assert sorted(found) == sorted(table.name for table in tables)


def test_quoted_messages_are_in_the_code():
    sources = [path.read_text() for path in (ROOT / "gimbal_jax").rglob("*.py") if "_pb2" not in path.name]
    known = [text for source in sources for text in messages(source)] + [(ROOT / "scripts" / "bootstrap").read_text()]
    rows = re.findall(r"^\| (.*?) \| ", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 15
    assert [message for message in quoted if not any(message in text for text in known)] == []


def test_statuses_of_serving_are_those_of_the_services():
    table = (DOCS / "serving.md").read_text().partition("| status | meaning |")[2].partition("\n\n")[0]
    rpc = "".join(path.read_text() for path in (ROOT / "gimbal_jax" / "serving" / "rpc").glob("*.py"))
    used = set(re.findall(r"StatusCode\.([A-Z_]+)", rpc)) - {"PERMISSION_DENIED"}  # of the gateway's own port only
    assert {code.name for code in STATUS_CODES.values()} <= used
    assert set(re.findall(r"^\| ([A-Z_]+) \|", table, re.MULTILINE)) == used


def test_statuses_of_failures_are_those_of_their_errors():
    rows = (ROOT / "deploy" / "README.md").read_text().partition("## When it fails")[2].splitlines()
    for start, error in (
        ("| a step fails", NotServing),
        ("| one sequence cannot go on", GenerationFailed),
        ("| one of several processes is lost", NotServing),
    ):
        (row,) = (line for line in rows if line.startswith(start))
        assert re.findall(STATUS, row) == [STATUS_CODES[error].name]


def test_every_policy_is_described():
    text = (DOCS / "scheduling.md").read_text()
    for policy in (*get_args(DispatchPolicy), *get_args(QueuePolicy), *get_args(PlacementPolicy)):
        assert f"`{policy}`" in text, policy
