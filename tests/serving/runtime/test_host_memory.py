"""The numbers move by what is allocated, and freed memory goes back to the system."""

import mmap
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gimbal_jax.serving.runtime.host_memory import (
    HUGE_PAGE,
    forget_peak,
    host_memory,
    trim_heap,
    use_huge_pages,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MB = 10**6


def test_host_memory_follows_allocations():
    forget_peak()
    before = host_memory()
    memory = mmap.mmap(-1, 64 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # malloc may have some at hand
    np.frombuffer(memory, np.uint8)[:] = 1
    during = host_memory()
    assert during.own - before.own == pytest.approx(64 * MB, abs=8 * MB)
    memory.close()
    after = host_memory()
    assert after.own < during.own - 48 * MB
    assert after.peak >= during.own + during.files - 8 * MB
    forget_peak()
    assert host_memory().peak < after.peak - 32 * MB


def test_trim_heap_returns_freed_memory_to_the_system():
    """Pieces too small to be maps of their own, the last of which keeps all before it from going back by itself."""
    pieces = [bytes(4096) for _ in range(20_000)]
    keep = pieces.pop()
    full = host_memory().own
    pieces.clear()
    trim_heap()
    assert host_memory().own < full - 60 * MB
    assert len(keep) == 4096


REUSES = """
import resource
import numpy as np
from gimbal_jax.serving.runtime.host_memory import reuse_freed_memory

def faults_again():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(64 * 10**6, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults_again()
by_default = faults_again()
reuse_freed_memory()
faults_again()
print(by_default, faults_again())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_freed_memory_is_reused():
    done = subprocess.run([sys.executable, "-c", REUSES], capture_output=True, text=True, check=True)
    by_default, reused = map(int, done.stdout.split())
    assert reused < by_default / 10


def anonymous_huge_pages():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))


def huge_pages_exist():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    return setting.exists() and "[never]" not in setting.read_text() and release >= (6, 1)


@pytest.mark.skipif(sys.platform != "linux" or not huge_pages_exist(), reason="no huge pages on request")
def test_memory_in_huge_pages_keeps_its_content():
    plain = mmap.mmap(-1, 16 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(plain, np.int64)
    array[:] = wanted = np.arange(len(array))
    before = anonymous_huge_pages()
    use_huge_pages([(array.ctypes.data, array.nbytes)])
    assert anonymous_huge_pages() - before >= 12 * HUGE_PAGE
    np.testing.assert_array_equal(array, wanted)


@pytest.mark.parametrize(("address", "size"), [(HUGE_PAGE + 1, HUGE_PAGE), (0, HUGE_PAGE), (3 * HUGE_PAGE, 100)])
def test_missing_or_small_memory_is_left_alone(address, size):
    use_huge_pages([(address, size)])
