"""Set up jax and hypothesis for every test, and sort the tests into tiers and worker groups."""

from pathlib import Path

import hypothesis
import jax
import pytest

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
# Files whose tests share no costly fixture: any worker may take any of their tests.
SPREAD = ["model/test_parity.py", "multihost"]
# Fixtures that compile. All tests with one of them run on one worker, so it compiles once.
SHARED = ["runner", "compile_cache"]


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(HERE)
        places = [str(path), *(str(folder) for folder in path.parents)]
        for place in places:
            if place in TIERS:
                item.add_marker(TIERS[place])
        shared = [name for name in SHARED if name in getattr(item, "fixturenames", ())]
        if shared:
            item.add_marker(pytest.mark.xdist_group(shared[0]))
        elif not any(place in SPREAD for place in places):
            item.add_marker(pytest.mark.xdist_group(str(path)))


@pytest.fixture(scope="session")
def runner():
    """Return the compiled runner of the smallest golden checkpoint on a 2 x 2 mesh."""
    from tests.e2e.rig import compiled_runner

    return compiled_runner()
