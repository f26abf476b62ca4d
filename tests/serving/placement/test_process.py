"""Decisions in a child process: equal answers, deaths of the child, and a clean end."""

import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gimbal_jax.config import MeshConfig, PlacementConfig, ServerConfig
from gimbal_jax.scheduler.placement import propose, static_placement
from gimbal_jax.scheduler.windows import WindowConfig, synthetic_windows
from gimbal_jax.serving.core.core import EngineCore
from gimbal_jax.serving.placement.child import NICENESS
from gimbal_jax.serving.placement.decision import decide
from gimbal_jax.serving.placement.process import PlacementProcess
from gimbal_jax.serving.placement.rebalance import Rebalancer
from gimbal_jax.serving.placement.records import PlacementRecord
from tests.serving.core.ticked_core import CONFIG as TICKED
from tests.serving.core.ticked_core import request, wait_for
from tests.serving.engine.fake_runner import FakeRunner
from tests.serving.fake_server import MODEL
from tests.serving.placement.mortal_policy import dies_without_traffic

CONFIG = ServerConfig(MeshConfig(2, 2), placement=PlacementConfig(policy="gimbal_refined", min_gain=0.0))
COUNTS_LSE = next(synthetic_windows(WindowConfig(layers=3), np.random.default_rng(0))).counts_LSE
PATIENCE_S = 120.0
"""Seconds to wait for a decision. The child has low priority, so a busy machine delays it."""
HERE_LE = static_placement(3, 128, CONFIG.mesh.ranks)


@contextmanager
def process():
    executor = PlacementProcess()
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def alive(pid: int) -> bool:
    """Return whether a process runs. A zombie does not."""
    status = Path(f"/proc/{pid}/status")
    try:
        return "\nState:\tZ" not in status.read_text()
    except OSError:
        return False


def pid_of(executor: PlacementProcess) -> int:
    return executor.submit(os.getpid).result()


def test_child_decides_like_a_local_call():
    call = propose, COUNTS_LSE, HERE_LE, CONFIG, COUNTS_LSE, HERE_LE
    with process() as executor:
        there = executor.submit(decide, *call).result()
    here = decide(*call)
    assert here.proposal.apply
    assert np.array_equal(there.proposal.slot_of_expert_LE, here.proposal.slot_of_expert_LE)
    assert [layer for layer, _ in there.rounds] == [layer for layer, _ in here.rounds]
    for (_, one), (_, other) in zip(there.rounds, here.rounds, strict=True):
        assert np.array_equal(one.slot_of_expert_E, other.slot_of_expert_E)
    assert there.achieved_gain == here.achieved_gain


def test_one_nice_child_runs_all_calls():
    with process() as executor:
        pids = [executor.submit(os.getpid) for _ in range(3)]
        nice = executor.submit(os.nice, 0).result()
        assert len({pid.result() for pid in pids}) == 1
        assert pids[0].result() != os.getpid()
    assert nice == min(os.nice(0) + NICENESS, 19)


def test_child_loads_no_jax_and_no_grpc():
    with process() as executor:
        executor.submit(decide, propose, COUNTS_LSE, HERE_LE, CONFIG, COUNTS_LSE, None).result()
        loaded = executor.submit(eval, "sorted(__import__('sys').modules)").result()
    assert "gimbal_jax.serving.placement.decision" in loaded
    assert {"jax", "grpc", "flax"}.isdisjoint(loaded)


def test_raised_error_fails_only_its_call():
    with process() as executor:
        uneven = executor.submit(decide, propose, COUNTS_LSE, HERE_LE[:, :-1], CONFIG, COUNTS_LSE, None)
        with pytest.raises(RuntimeError, match="127 experts cannot be split over 4 ranks"):
            uneven.result()
        pid = pid_of(executor)
        with pytest.raises(RuntimeError, match="AssertionError"):
            executor.submit(exec, "assert False").result()
        assert pid_of(executor) == pid


def test_unpicklable_call_fails_and_the_child_goes_on():
    with process() as executor:
        pid = pid_of(executor)
        with pytest.raises((pickle.PicklingError, AttributeError)):
            executor.submit(lambda: 1).result()
        with pytest.raises(RuntimeError, match=r"(?i)pickle"):
            executor.submit(eval, "lambda: 1").result()
        assert pid_of(executor) == pid


def test_printed_text_is_not_taken_for_an_answer():
    with process() as executor:
        executor.submit(print, "not pickle", flush=True).result()
        assert executor.submit(abs, -2).result() == 2


def test_death_in_a_call_fails_it_and_the_next_call_gets_a_new_child(tmp_path):
    with process() as executor:
        pid, at_work = pid_of(executor), tmp_path / "at work"
        slow = executor.submit(exec, f"import time; open({str(at_work)!r}, 'w').close(); time.sleep(60)")
        wait_for(at_work.exists)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"the placement process ended \(exit code -9\)"):
            slow.result(PATIENCE_S)
        assert pid_of(executor) != pid


def test_death_while_idle_fails_no_call():
    with process() as executor:
        pid = pid_of(executor)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not alive(pid))
        assert pid_of(executor) != pid


def test_child_ignores_interrupts():
    with process() as executor:
        pid = pid_of(executor)
        os.kill(pid, signal.SIGINT)
        assert pid_of(executor) == pid


def test_shutdown_kills_the_child_and_its_call():
    executor = PlacementProcess()
    pid = pid_of(executor)
    slow = executor.submit(time.sleep, 600)
    wait_for(slow.running)
    began = time.monotonic()
    executor.shutdown(cancel_futures=True)
    assert time.monotonic() - began < 300
    assert slow.exception() is not None
    assert not Path(f"/proc/{pid}").exists()


def test_shutdown_without_calls_starts_no_child():
    PlacementProcess().shutdown()


def test_child_ends_when_its_parent_is_killed():
    program = (
        "import os, time\n"
        "from gimbal_jax.serving.placement.process import PlacementProcess\n"
        "print(PlacementProcess().submit(os.getpid).result(), flush=True)\n"
        "time.sleep(60)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    wait_for(lambda: not alive(pid))


def test_server_survives_the_death_of_the_child():
    runner = FakeRunner(MODEL, TICKED)
    rebalancer = Rebalancer(MODEL, TICKED, runner, PlacementProcess(), dies_without_traffic)
    server = EngineCore(MODEL, TICKED, runner, rebalancer)
    records: tuple[PlacementRecord, ...] = ()

    def decided(count: int) -> bool:
        nonlocal records
        server.tick(0.0)
        records = server.status().placement.records
        return len(records) == count and records[-1].outcome != "migrating"

    try:
        server.open()
        server.rebalance()
        wait_for(lambda: decided(1), PATIENCE_S)
        server.submit(request("a"))
        server.tick(0.0)
        server.rebalance()
        wait_for(lambda: decided(2), PATIENCE_S)
    finally:
        server.stop()
    failed, good = records
    assert (failed.outcome, failed.reason) == (
        "failed",
        "decision failed: the placement process ended (exit code -9)",
    )
    assert good.outcome in ("kept", "applied")
    assert server.rebalancer.totals.failed_decisions == 1
