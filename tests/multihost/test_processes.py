"""The test harness: no process that it started outlives it, and a failure does not take the whole time limit."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.multihost import processes as harness
from tests.multihost.processes import ROOT, started, wait

SLEEPERS = ["sh", "-c", "sleep 600 & echo $!; exec sleep 600"]


def soon(condition, timeout_s: float = 300):
    """Return what the condition returns once it is true."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def is_alive(pid: int) -> bool:
    """Whether it exists and is no zombie."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_and_their_children_are_gone_after_an_error():
    with pytest.raises(KeyError), started([SLEEPERS, SLEEPERS]) as processes:
        pids = [process.popen.pid for process in processes]
        pids += [int(soon(lambda process=process: process.output().strip())) for process in processes]
        assert all(map(is_alive, pids))
        raise KeyError
    soon(lambda: not any(map(is_alive, pids)))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills them")
def test_processes_are_gone_when_the_test_process_is_killed():
    program = (
        "from tests.multihost.processes import started\n"
        "with started([['sleep', '600']]) as (process,): print(process.popen.pid, flush=True); process.popen.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(re.findall(r"\d+", parent.stdout.readline())[0])
        soon(lambda: "sleep" in Path("/proc", str(pid), "cmdline").read_text())
        parent.kill()
    soon(lambda: not is_alive(pid))


def test_wait_returns_all_codes_or_ends_soon_after_a_failure(monkeypatch):
    with started([["sh", "-c", "exit 3"], ["true"]]) as processes:
        assert wait(processes, 300) == [3, 0]
    monkeypatch.setattr(harness, "GRACE_S", 0.2)
    with started([["sh", "-c", "exit 3"], ["sleep", "6000"]]) as processes:
        assert wait(processes, 6000) == [3, None]
    with started([["sleep", "600"]]) as processes:
        assert wait(processes, 0.1) == [None]
