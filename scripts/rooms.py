"""Print the rooms of the source tree and the arrows between them, from the imports in the code.

    python -m scripts.rooms             # every room, the rooms that it imports, and the number of names
    python -m scripts.rooms --sizes     # files, lines, functions and comments
    python -m scripts.rooms --sizes --root ../other-checkout

A room is a package or a module at the root of ``gimbal_jax``, a package in ``gimbal_jax/serving``, or another top-level
folder of Python. Exit code 1 if rooms import each other in a cycle.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTSIDE = ("benchmarks", "examples", "research", "scripts")
"""Folders of Python outside the package, without the tests."""

type Arrows = dict[str, Counter[str]]


def sources(folder: Path) -> list[Path]:
    """Return the hand-written Python files under a folder, sorted."""
    return sorted(path for path in folder.rglob("*.py") if "_pb2" not in path.name)


def module_of(path: Path, root: Path = ROOT) -> str:
    """Return the dotted module name of a file; for ``__init__`` that of its package."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imported_names(source: str, module: str) -> Iterator[str]:
    """Yield the dotted names that a module imports, also inside functions; ``from a import b`` yields a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


def room_of(module: str, root: Path = ROOT) -> str:
    """Return the room of a dotted name, for example ``serving.engine``; empty if it belongs to no room."""
    top, *parts = module.split(".")
    if top != "gimbal_jax":
        return top if top in OUTSIDE else ""
    if parts[:1] == ["serving"] and len(parts) > 1 and (root / "gimbal_jax" / "serving" / parts[1]).is_dir():
        return ".".join(parts[:2])
    return parts[0] if parts else ""


def arrows(root: Path = ROOT) -> Arrows:
    """Return, for each room, the rooms that it imports and the number of different names."""
    found: dict[str, set[str]] = {}
    for folder in ("gimbal_jax", *OUTSIDE):
        for path in sources(root / folder):
            module = module_of(path, root)
            if room := room_of(module, root):
                found.setdefault(room, set()).update(imported_names(path.read_text(), module))
    counted = {room: Counter(room_of(name, root) for name in names) for room, names in found.items()}
    return {room: Counter({r: n for r, n in c.items() if r not in ("", room)}) for room, c in counted.items()}


def floors(graph: Mapping[str, Mapping[str, int]]) -> list[list[str]]:
    """Return the rooms by floor: a room is one floor above the highest room that it imports. Raises CycleError."""
    height: dict[str, int] = {}
    for room in TopologicalSorter(graph).static_order():
        height[room] = 1 + max((height[other] for other in graph.get(room, ())), default=-1)
    return [sorted(r for r, h in height.items() if h == floor) for floor in range(max(height.values()) + 1)]


def drawing(graph: Arrows) -> str:
    """Return the rooms floor by floor as text, each with its arrows."""
    lines = []
    for floor, rooms in enumerate(floors(graph)):
        lines.append(f"floor {floor}")
        for room in rooms:
            targets = ", ".join(f"{other} {n}" for other, n in sorted(graph.get(room, Counter()).items()))
            lines.append(f"  {room:<20} -> {targets or '(nothing)'}")
    return "\n".join(lines)


def sizes(root: Path) -> str:
    """Return files and lines by folder as text, then sizes of the package's functions, files and comments."""
    lines = ["folder        files   lines"]
    for folder in ("gimbal_jax", *OUTSIDE, "tests"):
        paths = sources(root / folder)
        lines.append(f"{folder:<12} {len(paths):>6} {sum(_lines(path) for path in paths):>7}")
    documents = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "deploy").rglob("*.md")]
    lines.append(f"{'*.md':<12} {len(documents):>6} {sum(_lines(path) for path in documents):>7}")
    package = sources(root / "gimbal_jax")
    folders = Counter(path.parent.relative_to(root).as_posix() for path in package if path.name != "__init__.py")
    functions = [(n, p) for p in package for n in ast.walk(ast.parse(p.read_text())) if isinstance(n, ast.FunctionDef)]
    length, longest = max((_length(node), f"{path.name}:{node.name}") for node, path in functions)
    arguments, most = max((_arguments(node), path.name) for node, path in functions if node.name == "__init__")
    comments = sum(_comments(path) for path in package)
    code = sum(_code_lines(path) for path in package)
    name, count = folders.most_common(1)[0]
    file_lines, file = max((_lines(path), path.name) for path in package)
    return "\n".join(
        [
            *lines,
            f"modules in the largest folder: {count} ({name})",
            f"lines of a file: median {statistics.median(map(_lines, package)):.0f}, most {file_lines} ({file})",
            f"lines of a function: median {statistics.median(_length(n) for n, _ in functions):.0f},"
            f" most {length} ({longest})",
            f"most arguments of an __init__: {arguments} ({most})",
            f"comment lines per 100 lines of code: {100 * comments / code:.1f} ({comments} of {code})",
        ]
    )


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def _length(node: ast.FunctionDef) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def _arguments(node: ast.FunctionDef) -> int:
    return len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) - 1


def _comments(path: Path) -> int:
    with path.open("rb") as file:
        return sum(token.type == tokenize.COMMENT for token in tokenize.tokenize(file.readline))


def _code_lines(path: Path) -> int:
    """Return the number of lines that are neither blank, comment nor docstring."""
    tree = ast.parse(path.read_text())
    strings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    rows = enumerate(path.read_text().splitlines(), start=1)
    return sum(bool(text.strip()) and not text.strip().startswith("#") and row not in strings for row, text in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the rooms of the source tree and the arrows between them.")
    parser.add_argument("--sizes", action="store_true", help="print files, lines, functions and comments instead")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to read; default: this one")
    options = parser.parse_args()
    if options.sizes:
        print(sizes(options.root))
        return
    try:
        print(drawing(arrows(options.root)))
    except CycleError as error:
        sys.exit(f"rooms import each other in a cycle: {' -> '.join(error.args[1])}")


if __name__ == "__main__":
    main()
