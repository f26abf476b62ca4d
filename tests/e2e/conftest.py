"""One compiled runner for all tests of a process; each test gets a server of its own over it."""

import pytest

from tests.e2e.rig import compiled_runner


@pytest.fixture(scope="session")
def runner():
    return compiled_runner()
