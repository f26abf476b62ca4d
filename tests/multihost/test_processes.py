"""The harness itself: nothing that it started outlives it, and a failure does not take the whole time limit."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.multihost import processes as harness
from tests.multihost.processes import ROOT, started, wait

SLEEPERS = ["sh", "-c", "sleep 600 & echo $!; exec sleep 600"]


def soon(condition, timeout_s: float = 30):
    """What the condition gives once it is true."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def is_alive(pid: int) -> bool:
    """Neither gone nor waiting to be reaped."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_they_and_what_they_started_are_gone_after_an_error():
    with pytest.raises(KeyError), started([SLEEPERS, SLEEPERS]) as processes:
        pids = [process.popen.pid for process in processes]
        pids += [int(soon(lambda process=process: process.output().strip())) for process in processes]
        assert all(map(is_alive, pids))
        raise KeyError
    soon(lambda: not any(map(is_alive, pids)))


@pytest.mark.skipif(sys.platform != "linux", reason="the system kills them there only")
def test_they_are_gone_when_the_test_process_is_killed():
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


def test_who_waits_gets_all_codes_or_does_not_wait_long_after_a_failure(monkeypatch):
    monkeypatch.setattr(harness, "GRACE_S", 0.2)
    with started([["sh", "-c", "exit 3"], ["true"]]) as processes:
        assert wait(processes, 30) == [3, 0]
    before = time.monotonic()
    with started([["sh", "-c", "exit 3"], ["sleep", "600"]]) as processes:
        assert wait(processes, 600) == [3, None]
    assert time.monotonic() - before < 60
    with started([["sleep", "600"]]) as processes:
        assert wait(processes, 0.1) == [None]
