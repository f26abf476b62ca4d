"""A folder of compiled programs for all tests that serve the demo model with the same options."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory) -> Path:
    """Return the folder for ``gimbal serve --compile-cache``; the first server fills it."""
    return tmp_path_factory.mktemp("compiled")
