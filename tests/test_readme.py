"""README.md and the pages for users are true: their Python runs, their commands parse, the names in them exist."""

import asyncio
import contextlib
import importlib.util
import io
import re
import shlex
import subprocess
import time
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

import gimbal_jax
from gimbal_jax.cli.main import app
from gimbal_jax.config import PlacementPolicy
from gimbal_jax.serving.frontend.frontend import Frontend
from gimbal_jax.serving.monitoring.metrics import ServerCollector
from gimbal_jax.serving.monitoring.request_metrics import RequestHistograms
from tests.serving.fake_server import FakeCore

ROOT = Path(gimbal_jax.__file__).parents[1]
PAGES = {
    name: (ROOT / name).read_text()
    for name in (
        "README.md",
        "docs/serving.md",
        "docs/clients.md",
        "docs/inspecting.md",
        "docs/library.md",
        "docs/troubleshooting.md",
    )
}
EVERY_PAGE = {
    str(path.relative_to(ROOT)): path.read_text()
    for folder in (".", "docs", "deploy", "research", "tests")
    for path in (ROOT / folder).glob("*.md")
}


def python_blocks() -> Iterator[tuple[str, str, str]]:
    """Yield the page, the code and the text block below it (or an empty text) of every Python block."""
    for page, text in PAGES.items():
        blocks = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for (language, code), (follower, output) in pairwise([*blocks, ("", "")]):
            if language == "python":
                yield page, code, output if follower == "text" else ""


BLOCKS = [pytest.param(code, output, id=f"{page}-{i}") for i, (page, code, output) in enumerate(python_blocks())]
NEED_SERVER = [block for block in BLOCKS if "127.0.0.1" in str(block.values[0])]
NEED_NONE = [block for block in BLOCKS if block not in NEED_SERVER]
SHELL = [
    pytest.param(line, id=f"{page}: {line[:60]}")
    for page, text in EVERY_PAGE.items()
    for block in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]
GIMBAL = typer.main.get_command(app)


def commands(group: Any) -> list[Any]:
    """Return all commands of a group and of its groups."""
    return [
        one for each in group.commands.values() for one in (commands(each) if hasattr(each, "commands") else [each])
    ]


@pytest.mark.parametrize(("code", "output"), NEED_NONE)
def test_python_prints_the_text_below_it(code: str, output: str):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "page", "exec"), {})
    assert printed.getvalue() == output


@pytest.mark.parametrize(("code", "output"), NEED_SERVER)
def test_python_for_a_server_compiles_and_has_its_address(code: str, output: str):
    compile(code, "page", "exec")
    assert "127.0.0.1:50051" in code or "127.0.0.1:8000" in code


@pytest.mark.parametrize("line", SHELL)
def test_shell_commands_parse(line: str):
    subprocess.run(["bash", "-n", "-c", line], check=True)
    if not line.startswith("gimbal "):
        return
    name, *arguments = shlex.split(line)[1:]
    group: Any = GIMBAL
    while hasattr(group := group.commands[name], "commands"):
        name, *arguments = arguments
    group.make_context(name, arguments)


def test_readme_is_short():
    assert len(PAGES["README.md"].splitlines()) <= 150


def test_flags_exist():
    flags = {flag for command in commands(GIMBAL) for parameter in command.params for flag in parameter.opts}
    of_others = {"--backend", "--base-url", "--model", "--tokenizer", "--loadgen"}
    """Flags of vLLM's load generator and of our benchmarks."""
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", "".join(PAGES.values())))
    assert "--dp" in named
    assert named <= flags | of_others | {"--help", "--config", "--print-config"}


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for text in EVERY_PAGE.values() for name in re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)}
    assert {"test", "test-all", "cuda-check"} <= named <= targets


@pytest.mark.parametrize("page", EVERY_PAGE)
def test_modules_and_scripts_that_are_run_exist(page: str):
    roots = "gimbal_jax|benchmarks|research|scripts|examples"
    for module in re.findall(rf"python -m ((?:{roots})\b(?:\.\w+)*)", EVERY_PAGE[page]):
        assert importlib.util.find_spec(module) is not None, module
    for script in re.findall(rf"(?<![\w/])((?:{roots})/[\w/]+\.\w+)", EVERY_PAGE[page]):
        assert (ROOT / script).exists() or page == "CHANGELOG.md", script


@pytest.mark.parametrize("page", EVERY_PAGE)
def test_extras_of_install_commands_exist(page: str):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for named in re.findall(r"'(?:\.|gimbal-jax)\[([\w,]+)\]'", EVERY_PAGE[page]):
        assert set(named.split(",")) <= set(extras)
    assert "pip install gimbal-jax" not in EVERY_PAGE[page].replace("'", "")  # the package is not on PyPI


@pytest.mark.parametrize("page", sorted({*EVERY_PAGE} - {"CHANGELOG.md"}))
def test_names_of_the_package_exist(page: str):
    for name in re.findall(r"`(gimbal_jax(?:\.\w+)+)`", EVERY_PAGE[page]):
        module, _, attribute = name.rpartition(".")
        if importlib.util.find_spec(module) is None or not hasattr(importlib.import_module(module), attribute):
            assert importlib.util.find_spec(name) is not None, name


def test_names_to_import_from_the_package_exist():
    named = {
        name.strip()
        for text in EVERY_PAGE.values()
        for names in re.findall(r"^from gimbal_jax import (?:\(([^)]*)\)|(.*))$", text, re.MULTILINE)
        for name in "".join(names).split(",")
    } - {""}
    assert "GimbalClient" in named
    assert named <= set(gimbal_jax.__all__)


def test_metrics_exist():
    async def families():
        core = FakeCore()
        return list(ServerCollector(Frontend(core, time.monotonic), RequestHistograms(core.config)).collect())

    names = {family.name + "_total" * (family.type == "counter") for family in asyncio.run(families())}
    pages = PAGES["README.md"] + PAGES["docs/serving.md"]
    named = set(re.findall(r"`(gimbal_[a-z_]+)`", pages)) - {"gimbal_jax", *get_args(PlacementPolicy)}
    assert "gimbal_remote_share" in named
    assert named <= names
