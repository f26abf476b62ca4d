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

# Room -> rooms that it may import. A room is a package, or a module at the root of gimbal_jax.
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    "version": set(),
    "exceptions": set(),
    "protos": set(),
    "pallas_kernels": set(),
    "scheduler": {"config"},
    "model": {"config", "pallas_kernels"},
    "serving.network": {"config", "exceptions"},
    "serving.engine": {"config", "exceptions", "scheduler"},
    "serving.text": {"exceptions", "serving.engine"},
    "serving.placement": {"config", "exceptions", "scheduler", "serving.engine"},
    "serving.core": {"config", "exceptions", "scheduler", "serving.engine", "serving.placement"},
    "serving.runtime": {"config", "exceptions", "pallas_kernels", "scheduler", "model", "serving.engine"},
    "serving.cluster": {"config", "version", "exceptions", "serving.network", "serving.runtime"},
    "serving.gateway": {"exceptions", "serving.network"},
    "serving.frontend": {"config", "exceptions", "scheduler", "serving.engine", "serving.text", "serving.core"},
    "serving.monitoring": {
        *("config", "version", "exceptions", "scheduler"),
        *("serving.engine", "serving.placement", "serving.core", "serving.frontend"),
    },
    "serving.rpc": {
        *("config", "exceptions", "protos", "scheduler", "model", "serving.network", "serving.engine"),
        *("serving.text", "serving.core", "serving.gateway", "serving.frontend", "serving.monitoring"),
    },
    "client": {"protos", "scheduler", "serving.engine", "serving.placement", "serving.text"},
    "bench": {"client", "serving.engine", "serving.network"},
    "planning": {"config", "exceptions", "scheduler", "model", "pallas_kernels", "serving.engine", "serving.runtime"},
    "simulation": {
        *("config", "exceptions", "scheduler", "model", "bench"),
        *("serving.engine", "serving.placement", "serving.core"),
    },
}
# The command line is the composition root: it may import every room, and no room may import it.
ALLOWED["cli"] = {*ALLOWED, "cli.serve"}
ALLOWED["cli.serve"] = {*ALLOWED, "cli"}

# Rooms that run without jax. Importing any of their modules must not load it.
NO_JAX = {
    *("config", "version", "exceptions", "protos", "scheduler", "client", "bench", "simulation"),
    *("serving.network", "serving.engine", "serving.placement", "serving.core", "serving.text"),
    *("serving.frontend", "serving.monitoring", "serving.gateway", "serving.rpc"),
}
# Room -> foreign packages that it may import; every other room may import any dependency.
FOREIGN: dict[str, set[str]] = {
    "config": set(),
    "version": set(),
    "exceptions": set(),
    "pallas_kernels": {"jax"},
    "scheduler": {"numpy"},
}
# Module -> foreign packages that it may import in addition to those of its room.
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


def room_of(module: str) -> str:
    """The longest room that a dotted name of gimbal_jax lies in; empty for the package itself."""
    parts = module.removesuffix(".__init__").split(".")[1:]
    return next((room for n in (2, 1) if (room := ".".join(parts[:n])) in ALLOWED), "")


def forbidden_imports(source: str, module: str) -> list[str]:
    room, found = room_of(module), []
    foreign = FOREIGN.get(room)
    for name in imported_names(source, module):
        top = name.partition(".")[0]
        if top == "gimbal_jax":
            if room_of(name) not in {room, *ALLOWED[room]}:
                found.append(name)
        elif foreign is not None and top not in sys.stdlib_module_names | foreign | EXCEPTIONS.get(module, set()):
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
        ("gimbal_jax.scheduler.queue", "from ..serving.engine import plan", ["gimbal_jax.serving.engine.plan"]),
        ("gimbal_jax.model.moe", "from gimbal_jax.scheduler import traffic", ["gimbal_jax.scheduler.traffic"]),
        ("gimbal_jax.scheduler.queue", "import scipy", ["scipy"]),
        ("gimbal_jax.config", "import numpy", ["numpy"]),
        ("gimbal_jax.serving.core.core", "import gimbal_jax.cli.main", ["gimbal_jax.cli.main"]),
        (
            "gimbal_jax.serving.engine.engine",
            "import gimbal_jax.serving.core.core",
            ["gimbal_jax.serving.core.core"],
        ),
    ],
)
def test_forbidden_imports_are_seen(module: str, source: str, found: list[str]):
    assert forbidden_imports(source, module) == found


def modules_of(room: str) -> list[str]:
    return [name for path in sources(PACKAGE) if room_of(name := module_of(path)) == room]


@pytest.mark.parametrize("room", sorted(NO_JAX))
def test_room_does_not_load_jax(room: str):
    modules = modules_of(room)
    assert modules or room == "protos"
    program = f"import sys, {', '.join(modules or ['gimbal_jax'])}\nsys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_every_module_lies_in_a_room():
    assert [name for path in sources(PACKAGE) if not room_of(name := module_of(path))] == [
        "gimbal_jax.__init__",
        "gimbal_jax.serving.__init__",
    ]


def test_scipy_is_loaded_by_the_exact_solver_only():
    modules = [module_of(path) for path in sources(PACKAGE / "scheduler") if path.stem not in ("__init__", "exact")]
    program = f"import sys, gimbal_jax.planning.placements, {', '.join(modules)}\nsys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_package_reads_no_environment_variables():
    assert {module_of(path): lines for path in sources(PACKAGE) if (lines := environment_uses(path.read_text()))} == {}
    assert environment_uses("import os\nos.environ['A']\nos.getenv('A')\nfrom os import environ") == [2, 3, 4]


def test_files_are_short():
    folders = [PACKAGE, *(ROOT / name for name in ("benchmarks", "examples", "research", "scripts", "tests"))]
    lengths = {path: len(path.read_text().splitlines()) for folder in folders for path in sources(folder)}
    assert {str(path): length for path, length in lengths.items() if length > 500} == {}
    assert statistics.median(lengths.values()) < 150
