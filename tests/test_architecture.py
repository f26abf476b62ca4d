"""ARCHITECTURE.md and tests/README.md are true: rooms and their modules, axes, and the tests that they name."""

import ast
import re
from pathlib import Path

import pytest

import gimbal_jax
from tests.test_imports import ALLOWED

ROOT = Path(gimbal_jax.__file__).parents[1]
PACKAGE = ROOT / "gimbal_jax"
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
PACKAGES = sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent.name != "protos")


def first_cells(heading: str) -> list[str]:
    """Return the names in backquotes in the first column of the table below a heading."""
    table = TEXT.partition(heading)[2].partition("\n|")[2].partition("\n\n")[0]
    return [name for line in table.splitlines() for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])]


def axes_of(source: str) -> set[str]:
    """Return the axis letters at the end of the names of a module: counts_LSE has L, S and E."""
    names = re.findall(r"\b[a-z0-9_]+_([A-Za-z0-9]*[A-Z][A-Za-z0-9]*)\b", source)
    return {letter for name in names for letter in name if len(name) <= 6}


def test_every_room_is_named_once():
    assert sorted(first_cells("## Rooms")) == sorted(room.replace(".", "/") for room in ALLOWED)


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_every_module_is_named_in_the_docstring_of_its_room(folder: Path):
    doc = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    missing = {name for name in modules if not re.search(rf"\b{name}\b", doc)}
    assert doc and not missing, f"{folder.relative_to(ROOT)}/__init__.py does not name {sorted(missing)}"


def test_common_axes_are_in_the_legend():
    legend = first_cells("**Axes**")
    assert legend == list("LSERPTDV")
    assert axes_of("counts_LSE = f(x_TD)") == set("LSETD")
    used = set().union(*(axes_of(path.read_text()) for path in PACKAGE.rglob("*.py")))
    assert set(legend) <= used


def test_named_tests_exist():
    text = TEXT + (ROOT / "tests" / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 50
    for path, name in named:
        assert (ROOT / path).exists(), path
        functions = {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if hasattr(node, "name")}
        assert not name or name in functions, f"{path} has no {name}"
