"""README.md and docs/serving.md are true: the Python runs and prints what they say, commands parse, names exist."""

import asyncio
import contextlib
import io
import re
import shlex
import time
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

import gimbal_jax
from gimbal_jax.cli.main import app
from gimbal_jax.config import DispatchPolicy, PlacementPolicy, QueuePolicy
from gimbal_jax.serving.frontend.frontend import Frontend
from gimbal_jax.serving.monitoring.metrics import ServerCollector
from gimbal_jax.serving.monitoring.request_metrics import RequestHistograms
from tests.serving.fake_server import FakeCore

ROOT = Path(gimbal_jax.__file__).parents[1]
README = (ROOT / "README.md").read_text()
SERVING = (ROOT / "docs" / "serving.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
# A block that needs no server is followed by what it prints.
PRINTING = [
    (code, output)
    for (language, code), (follower, output) in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True)
    if (language, follower) == ("python", "text")
]
SHELL = [
    line
    for text in re.findall(r"^```sh\n(.*?)^```$", README + SERVING, re.MULTILINE | re.DOTALL)
    for line in text.splitlines()
]
GIMBAL = typer.main.get_command(app)


def commands(group: Any) -> list[Any]:
    """All commands of a group, those of its groups too."""
    return [
        one for each in group.commands.values() for one in (commands(each) if hasattr(each, "commands") else [each])
    ]


@pytest.mark.parametrize(("code", "output"), PRINTING, ids=range(len(PRINTING)))
def test_python_prints_what_it_says(code: str, output: str):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue() == output


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_all_other_python_needs_a_server(code: str):
    compile(code, "README.md", "exec")
    assert ("127.0.0.1:50051" in code) != (code in dict(PRINTING))


@pytest.mark.parametrize("line", [line for line in SHELL if line.startswith("gimbal ")])
def test_commands_parse(line: str):
    name, *arguments = shlex.split(line)[1:]
    group: Any = GIMBAL
    while hasattr(group := group.commands[name], "commands"):
        name, *arguments = arguments
    group.make_context(name, arguments)


def test_flags_exist():
    flags = {flag for command in commands(GIMBAL) for parameter in command.params for flag in parameter.opts}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", README + SERVING))
    assert "--dp" in named
    assert named <= flags | {"--help"}


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {line.split()[1] for line in SHELL if line.startswith("make ")}
    assert named and named <= targets


def test_policies_are_all_named():
    rows = re.findall(r"^\|[^|]*\| `(\w+)` \|", README, re.MULTILINE)
    assert rows == [*get_args(DispatchPolicy), *get_args(QueuePolicy), *get_args(PlacementPolicy)]


def test_metrics_exist():
    async def families():
        core = FakeCore()
        return list(ServerCollector(Frontend(core, time.monotonic), RequestHistograms(core.config)).collect())

    names = {family.name + "_total" * (family.type == "counter") for family in asyncio.run(families())}
    named = set(re.findall(r"`(gimbal_[a-z_]+)`", README + SERVING)) - {"gimbal_jax", *get_args(PlacementPolicy)}
    assert "gimbal_remote_share" in named
    assert named <= names
