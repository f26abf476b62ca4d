"""docs/research.md is true: its programs run as they stand there and print what the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "research.md").read_text()
POLICIES, MAKE_COUNTS, ON_COUNTS, SERVE = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
(PRINTED,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a program next to my_policies.py in its own process and returns the output."""
    (tmp_path / "my_policies.py").write_text(POLICIES)

    def run_there(program: str) -> str:
        paths = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
        command = [sys.executable, "-c", program]
        return subprocess.run(command, cwd=tmp_path, env=paths, capture_output=True, text=True, check=True).stdout

    return run_there


def test_the_example_of_counted_traffic_prints_the_shown_output(run):
    run(MAKE_COUNTS)
    assert run(ON_COUNTS) == PRINTED


def test_the_example_server_dispatches_and_places(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "demo-model").symlink_to(ROOT / "tests" / "goldens" / "base")
    dispatched, *placed = run(SERVE).splitlines()
    assert set(re.findall(r"'(\w+)'", dispatched)) <= {"coolest", "missing"} and "coolest" in dispatched
    assert placed
    for line in placed:
        assert re.fullmatch(r"nearest (applied|migrating|kept) remote \d+%", line)
    assert placed[0].startswith("nearest applied")
