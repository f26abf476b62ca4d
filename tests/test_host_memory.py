"""The numbers move by what is allocated, and freed memory goes back to the system."""

import sys

import numpy as np
import pytest

from gimbal_jax.host_memory import forget_peak, give_back_freed_memory, host_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MB = 10**6


def test_own_memory_and_its_peak_follow_what_is_allocated():
    forget_peak()
    before = host_memory()
    array = np.ones(64 * MB, np.uint8)
    during = host_memory()
    assert during.own - before.own == pytest.approx(array.nbytes, abs=8 * MB)
    del array
    after = host_memory()
    assert after.own < during.own - 48 * MB
    assert after.peak >= during.own + during.files - 8 * MB
    forget_peak()
    assert host_memory().peak < after.peak - 32 * MB


def test_freed_memory_goes_back_to_the_system():
    """Pieces too small to be maps of their own, the last of which keeps all before it from going back by itself."""
    pieces = [bytes(4096) for _ in range(20_000)]
    keep = pieces.pop()
    full = host_memory().own
    pieces.clear()
    give_back_freed_memory()
    assert host_memory().own < full - 60 * MB
    assert len(keep) == 4096
