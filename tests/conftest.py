"""Set up jax and hypothesis for every test, and sort the tests into tiers and worker groups."""

from pathlib import Path, PurePosixPath

import hypothesis
import jax
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

# No deadlines, because the machine may be busy. `--hypothesis-profile fast` selects the other profile.
hypothesis.settings.register_profile("full", deadline=None)
hypothesis.settings.register_profile("fast", deadline=None, max_examples=25)
hypothesis.settings.load_profile("full")

HERE = Path(__file__).parent

# Tier of whole folders and files. Single functions and parameters carry their mark themselves.
TIERS = {
    "benchmarks": "tools",
    "deploy": "tools",
    "e2e/test_bench.py": "process",
    "e2e/test_gateway.py": "process",
    "e2e/test_startup.py": "slow",
    "multihost": "process",
    "research": "tools",
    "scheduler/test_unseen_windows.py": "slow",
    "serving/monitoring/test_dashboard.py": "tools",
    "test_monitoring.py": "tools",
    "test_research.py": "process",
}
# Worker groups: all tests of one group run on one worker, so its fixtures compile once. By default a file is a group.
GROUPS = {
    "e2e/test_bench.py": "served demo model",
    "e2e/test_gateway.py": "served demo model",
    "e2e": "compiled runner",
    "serving/runtime/test_device_runner.py": "compiled runner",
}
# Any worker may take any of these tests, because they share no costly fixture.
SPREAD = ["model/test_parity.py", "multihost/test_serve.py"]


def places_of(path: str) -> list[str]:
    """Return a path below this folder and the folders above it, the most specific first."""
    return [path, *(str(folder) for folder in PurePosixPath(path).parents)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for place in places_of(item.path.relative_to(HERE).as_posix()):
            if place in TIERS:
                item.add_marker(TIERS[place])


class Groups(LoadScopeScheduling):
    """Distribution of the tests by ``GROUPS``.

    ``--dist loadgroup`` of pytest-xdist 3.8 does not group with pytest 9.2, because node ids no longer change.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::")[0].removeprefix("tests/")
        if path in SPREAD:
            return nodeid
        return next((GROUPS[place] for place in places_of(path) if place in GROUPS), path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Groups:
    return Groups(config, log)


@pytest.fixture(scope="session")
def runner():
    """Return the compiled runner of the smallest golden checkpoint on a 2 x 2 mesh."""
    from tests.e2e.rig import compiled_runner

    return compiled_runner()
