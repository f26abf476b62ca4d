"""The rules of the source tree: who imports whom, no environment variables, short files."""

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gimbal_jax

ROOT = Path(gimbal_jax.__file__).parents[1]
PACKAGE = ROOT / "gimbal_jax"
ANY = None

# Part of the package -> parts of it that it may import, and foreign packages (ANY: whatever we depend on).
ALLOWED: dict[str, tuple[set[str], set[str] | None]] = {
    "config": (set(), set()),
    "version": (set(), set()),
    "pallas_kernels": (set(), {"jax"}),
    "scheduler": ({"config"}, {"numpy"}),
    "model": ({"config", "pallas_kernels"}, ANY),
    "serving": ({"config", "scheduler", "model", "pallas_kernels", "version"}, ANY),
    "place": ({"config", "scheduler"}, ANY),
    "planning": ({"config", "scheduler", "model", "pallas_kernels", "serving"}, ANY),
    "mesh_cli": ({"config", "scheduler", "planning", "terminal"}, ANY),
    "terminal": (set(), {"rich", "typer"}),
    "host_memory": (set(), set()),
    "devices": ({"config", "model", "terminal"}, {"jax"}),
    "serve_options": ({"config", "devices"}, {"typer"}),
    "serve_config": ({"serve_options", "terminal"}, {"typer"}),
    "processes": ({"config", "serve_options", "terminal"}, {"jax"}),
    "serve_runner": (
        {"config", "model", "pallas_kernels", "serving", "devices", "host_memory", "serve_options", "terminal"},
        {"jax"},
    ),
    "serve_group": ({"config", "model", "serving", "processes", "serve_options", "serve_runner", "terminal"}, ANY),
    "serve_cli": (
        {
            *("config", "scheduler", "model", "serving", "devices", "terminal"),
            *("processes", "serve_options", "serve_config", "serve_runner", "serve_group"),
        },
        ANY,
    ),
    "bench_cli": ({"bench", "serving", "terminal", "version"}, {"typer"}),
    "bench": ({"serving", "terminal"}, {"rich"}),
    "top": ({"terminal", "top_screen"}, {"rich", "typer"}),
    "top_screen": (set(), {"numpy", "rich"}),
    "simulation": ({"config", "scheduler", "serving", "model", "terminal"}, ANY),
    "simulate_cli": ({"config", "scheduler", "simulation", "terminal"}, ANY),
    "cli": (
        {
            "config",
            "scheduler",
            "model",
            "pallas_kernels",
            "serving",
            "simulation",
            "simulate_cli",
            "bench_cli",
            "place",
            "mesh_cli",
            "devices",
            "serve_cli",
            "terminal",
            "top",
            "version",
        },
        ANY,
    ),
}
# Module -> what it alone of its part may import as well.
EXCEPTIONS = {
    "gimbal_jax.scheduler.exact": {"scipy"},
    "gimbal_jax.pallas_kernels.grouped_matmul": {"tokamax"},
}


def is_generated(path: Path) -> bool:
    return "_pb2" in path.name


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if not is_generated(path))


def imported_names(source: str, module: str) -> Iterator[str]:
    """Dotted names that a module imports, anywhere in it; ``from a import b`` gives a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


def forbidden_imports(source: str, module: str) -> list[str]:
    part = module.split(".")[1]
    parts, foreign = ALLOWED[part]
    found = []
    for name in imported_names(source, module):
        top, _, rest = name.partition(".")
        if top == "gimbal_jax":
            if rest.split(".")[0] not in {part, *parts}:
                found.append(name)
        elif foreign is not ANY and top not in sys.stdlib_module_names | foreign | EXCEPTIONS.get(module, set()):
            found.append(name)
    return found


def environment_uses(source: str) -> list[int]:
    """Lines that read or write environment variables."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    return sorted(
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and names & {alias.name for alias in node.names})
    )


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


PACKAGE_FILES = [path for path in sources(PACKAGE) if path.parent != PACKAGE or path.name != "__init__.py"]


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=module_of)
def test_imports_go_one_way(path: Path):
    assert forbidden_imports(path.read_text(), module_of(path)) == []


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("gimbal_jax.scheduler.queue", "import jax.numpy as jnp", ["jax.numpy"]),
        ("gimbal_jax.scheduler.queue", "def f():\n    from gimbal_jax.model import moe", ["gimbal_jax.model.moe"]),
        ("gimbal_jax.scheduler.queue", "import numpy, math\nfrom gimbal_jax import config\nfrom . import trace", []),
        ("gimbal_jax.scheduler.queue", "from ..serving import engine", ["gimbal_jax.serving.engine.engine"]),
        ("gimbal_jax.model.moe", "from gimbal_jax.scheduler import traffic", ["gimbal_jax.scheduler.traffic"]),
        ("gimbal_jax.scheduler.queue", "import scipy", ["scipy"]),
        ("gimbal_jax.config", "import numpy", ["numpy"]),
        ("gimbal_jax.serving.core.core", "import gimbal_jax.cli.main", ["gimbal_jax.cli.main"]),
    ],
)
def test_forbidden_imports_are_seen(module: str, source: str, found: list[str]):
    assert forbidden_imports(source, module) == found


@pytest.mark.parametrize("part", ["scheduler", "simulation"])
def test_what_needs_no_device_does_not_load_jax(part: str):
    modules = [module_of(path) for path in sources(PACKAGE / part) if path.name != "__init__.py"]
    assert modules
    program = f"import sys, {', '.join(modules)}\nsys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_scipy_is_loaded_by_the_exact_solver_only():
    modules = [module_of(path) for path in sources(PACKAGE / "scheduler") if path.stem not in ("__init__", "exact")]
    program = f"import sys, gimbal_jax.planning.placements, {', '.join(modules)}\nsys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_package_reads_no_environment_variables():
    assert {module_of(path): lines for path in sources(PACKAGE) if (lines := environment_uses(path.read_text()))} == {}
    assert environment_uses("import os\nos.environ['A']\nos.getenv('A')\nfrom os import environ") == [2, 3, 4]


def test_files_are_short():
    folders = [PACKAGE, ROOT / "scripts", ROOT / "tests"]
    lengths = {path: len(path.read_text().splitlines()) for folder in folders for path in sources(folder)}
    assert {str(path): length for path, length in lengths.items() if length > 500} == {}
    assert statistics.median(lengths.values()) < 150
