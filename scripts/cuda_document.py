"""The parts of docs/cuda.md that commands write."""

from collections.abc import Sequence
from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "docs" / "cuda.md"


def write_section(name: str, text: str) -> None:
    """Put ``text`` between the comments that begin and end this section."""
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->\n"
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(begin)
    after = rest.split(end)[1]
    DOCUMENT.write_text(f"{before}{begin}{text.rstrip()}\n{end}{after}", encoding="utf-8")


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = (columns, ["---"] * len(columns), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
