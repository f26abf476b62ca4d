"""The public names of the package."""

import subprocess
import sys

import gimbal_jax


def test_every_public_name_exists():
    assert {name for name in gimbal_jax.__all__ if not hasattr(gimbal_jax, name)} == set()
    assert not hasattr(gimbal_jax, "no_such_name")


def test_jax_is_loaded_when_it_is_first_needed():
    program = """
import sys
from gimbal_jax import Dispatcher, propose
before = {"jax", "grpc", "flax"} & set(sys.modules)
from gimbal_jax import route_and_count
sys.exit(bool(before) or "jax" not in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
