"""CONTRIBUTING.md is complete: it says what every dependency is for, and each has a tested version."""

import re
import tomllib
from pathlib import Path

import gimbal_jax

ROOT = Path(gimbal_jax.__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~ ]", requirement)[0] for requirement in requirements} - {PROJECT["name"]}


def test_every_dependency_is_explained():
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Dependencies")[2]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")][1:]
    explained = {re.sub(r"\*\w+:\*|\[\w+\]", "", name).strip() for cell in cells for name in cell.split(",")}
    extras = [requirement for extra in PROJECT["optional-dependencies"].values() for requirement in extra]
    assert explained == names(PROJECT["dependencies"]) | names(extras)


def test_every_dependency_has_a_tested_version():
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower() for line in constraints if "==" in line}
    wanted = names(PROJECT["dependencies"]) | names(PROJECT["optional-dependencies"]["dev"])
    assert {name.replace("_", "-") for name in wanted} <= {name.replace("_", "-") for name in pinned}
