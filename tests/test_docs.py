"""docs/: the examples of scheduling.md print what stands after them, and links lead somewhere."""

import contextlib
import io
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = r"^```python\n(.*?)^```\n```text\n(.*?)^```$"
EXAMPLES = re.findall(BLOCK, (DOCS / "scheduling.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("code", "output"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_of_scheduling_print_what_they_say(code: str, output: str):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "scheduling.md", "exec"), {})
    assert printed.getvalue() == output


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path):
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target
