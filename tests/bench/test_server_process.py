import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gimbal_jax.bench.server_process import cpu_seconds, peak_rss_bytes, running_server

needs_proc = pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")


def known[T](value: T | None) -> T:
    assert value is not None
    return value


@needs_proc
def test_peak_memory_is_that_of_the_process_after_it_was_freed():
    program = "block = b'1' * 2**27; del block; print('freed', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert known(process.stdout).readline() == b"freed\n"
        peak = known(peak_rss_bytes(process.pid))
        known(process.stdin).close()
    assert 2**27 < peak < 2**27 + 2**26


@needs_proc
def test_cpu_time_is_that_of_the_process():
    before, own = known(cpu_seconds(os.getpid())), time.process_time()
    while time.process_time() < own + 0.1:
        pass
    assert known(cpu_seconds(os.getpid())) - before == pytest.approx(time.process_time() - own, abs=0.03)


def test_a_server_that_does_not_start_says_why(tmp_path):
    async def start():
        async with running_server("model", ("--nonsense",), tmp_path / "log"):
            pass

    with pytest.raises(ChildProcessError, match=r"does not serve \(exit code 2\):(.|\n)*--nonsense"):
        asyncio.run(start())
