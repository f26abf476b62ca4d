"""Write the generated parts of docs/cuda.md and of other documents."""

from collections.abc import Sequence
from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "docs" / "cuda.md"


def write_section(name: str, text: str, document: Path | None = None) -> None:
    """Replace the text between the comments that begin and end a section, by default in docs/cuda.md."""
    document = document or DOCUMENT
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->\n"
    before, rest = document.read_text(encoding="utf-8").split(begin)
    after = rest.split(end)[1]
    document.write_text(f"{before}{begin}{text.rstrip()}\n{end}{after}", encoding="utf-8")


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = (columns, ["---"] * len(columns), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
