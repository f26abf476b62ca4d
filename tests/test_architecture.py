"""ARCHITECTURE.md is true: its modules, its axes and the tests that it names are those of the code."""

import ast
import re
from pathlib import Path

import gimbal_jax

ROOT = Path(gimbal_jax.__file__).parents[1]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
MODULES = {
    str(path.relative_to(ROOT))
    for path in (ROOT / "gimbal_jax").rglob("*.py")
    # Not generated code, and not the faces of packages.
    if "protos" not in path.parts and (path.name != "__init__.py" or path.parent == ROOT / "gimbal_jax")
}


def first_cells(heading: str) -> list[str]:
    """Names in backquotes in the first column of the table under this heading."""
    table = TEXT.partition(heading)[2].partition("\n|")[2].partition("\n\n")[0]
    return [name for line in table.splitlines() for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])]


def axes_of(source: str) -> set[str]:
    """Axis letters at the end of the names of a module: counts_LSE has L, S and E."""
    names = {
        name
        for node in ast.walk(ast.parse(source))
        for attribute in ("id", "arg", "attr", "name")
        if isinstance(name := getattr(node, attribute, None), str) and not name.startswith("do_")  # http.server's
    }
    suffixes = [match[1] for name in names if (match := re.fullmatch(r"[a-z0-9_]+_((?:\d?[A-Z]|\d?[a-z]|\d)+)", name))]
    return {axis for s in suffixes if re.search("[A-Z]", s) for axis in re.findall(r"\d?[A-Za-z]|\d", s)}


def test_every_module_is_named_once():
    named = [name for name in first_cells("## Packages") if name.endswith(".py")]
    assert sorted(named) == sorted(MODULES)


def test_every_axis_is_in_the_legend():
    assert axes_of("def f(counts_LSE, max_k): routing_N2k, total_L1 = top_k, GREEN") == {*"LSEN1", "2k"}
    used = set().union(*(axes_of((ROOT / module).read_text()) for module in MODULES))
    # n stands alone (order_n): not seen as a suffix, since names like max_n end so too.
    assert used | {"n"} == set(first_cells("**Axes**"))


def test_every_test_that_it_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
    assert len(named) > 10
    for path, name in named:
        functions = {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if hasattr(node, "name")}
        assert name in functions, f"{path} has no {name}"
