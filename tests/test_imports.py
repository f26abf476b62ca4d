"""The rules of the source tree: who imports whom, no environment variables, short files."""

import ast
import statistics
import subprocess
import sys
from graphlib import CycleError
from pathlib import Path

import pytest

import gimbal_jax
from scripts.rooms import arrows, floors, imported_names, module_of, room_of, sources

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
        *("config", "version", "exceptions", "protos", "scheduler", "model", "serving.network", "serving.engine"),
        *("serving.text", "serving.core", "serving.gateway", "serving.frontend", "serving.monitoring"),
    },
    "client": {"exceptions", "protos", "scheduler", "serving.engine", "serving.placement", "serving.text"},
    "bench": {"client", "serving.engine", "serving.network"},
    "planning": {"config", "exceptions", "scheduler", "model", "pallas_kernels", "serving.engine", "serving.runtime"},
    "simulation": {
        *("config", "exceptions", "scheduler", "model", "bench"),
        *("serving.engine", "serving.placement", "serving.core"),
    },
}
# The command line puts all rooms together. ``cli.serve`` is the composition root of a server.
ALLOWED["cli"] = set(ALLOWED)

# Rooms whose modules name jax in an import. Of the command line only ``cli.serve`` does.
JAX = {"pallas_kernels", "model", "serving.runtime", "planning", "cli"}
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
    """Modules of a room, or of a package in it."""
    return [name for name in map(module_of, sources(PACKAGE)) if f"{name}.".startswith(f"gimbal_jax.{room}.")]


def test_rooms_without_devices_do_not_load_jax():
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'jax' in sys.modules: sys.exit(f'{name} loads jax')"
    )
    modules = [name for room in sorted(NO_JAX) for name in [f"gimbal_jax.{room}", *modules_of(room)]]
    done = subprocess.run([sys.executable, "-c", program, *modules], cwd=ROOT, check=False, capture_output=True)
    assert (done.returncode, done.stderr.decode()) == (0, "")


def test_the_table_holds_every_room():
    rooms = {room_of(module_of(path)) for path in sources(PACKAGE)}
    assert rooms - {"", "serving"} == set(ALLOWED)


def test_no_room_is_part_of_a_circle():
    assert floors(arrows())
    with pytest.raises(CycleError):
        floors({"a": {"b": 1}, "b": {"a": 1}})


def test_jax_is_named_in_few_rooms():
    names_jax = set()
    for path in sources(PACKAGE):
        module = module_of(path)
        if any(name.split(".")[0] == "jax" for name in imported_names(path.read_text(), module)):
            names_jax.add(module)
    assert {room_of(module) for module in names_jax} == JAX
    assert {module for module in names_jax if room_of(module) == "cli"} <= set(modules_of("cli.serve"))


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
