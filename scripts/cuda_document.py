"""The parts of docs/cuda.md, and of other documents, that commands write."""

from collections.abc import Sequence
from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "docs" / "cuda.md"


def write_section(name: str, text: str, document: Path | None = None) -> None:
    """Put ``text`` between the comments that begin and end this section, of docs/cuda.md by default."""
    document = document or DOCUMENT
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->\n"
    before, rest = document.read_text(encoding="utf-8").split(begin)
    after = rest.split(end)[1]
    document.write_text(f"{before}{begin}{text.rstrip()}\n{end}{after}", encoding="utf-8")


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = (columns, ["---"] * len(columns), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
