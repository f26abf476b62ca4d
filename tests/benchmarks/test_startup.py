"""The stages of a start, by a process that says what a server says."""

import signal
import sys

import pytest

from benchmarks.startup import one_start

SAYS = """
import signal, sys, time
def say(line):
    print(line, file=sys.stderr, flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(%d))
sum(range(10**7)); say("KV cache of an engine: 7 pages")
time.sleep(0.3); say("loading 3/3"); say("listening on 127.0.0.1:1")
time.sleep(0.1); say("compiling 2/2"); say("serving; peak memory 0.1 GiB")
signal.pause()
"""


def test_stages_add_up_and_the_server_is_ended():
    took = one_start([sys.executable, "-c", SAYS % 0])
    assert set(took) == {"imports", "weights", "programs", "all", "cpu"}
    assert min(took["weights"], took["programs"]) > 0  # not as long as it slept, because lines may be read late
    assert took["all"] == pytest.approx(took["imports"] + took["weights"] + took["programs"])
    assert 0 < took["cpu"] < took["all"] - 0.2


def test_a_server_that_ends_before_it_serves_is_an_error():
    with pytest.raises(RuntimeError, match="ended with 3 before it served"):
        one_start([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match=f"ended with {-signal.SIGKILL}"):
        one_start([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
