"""Files of the placement loop: complete, written in the background, and never in the way of a step."""

import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gimbal_jax.config import MeshConfig, PlacementConfig
from gimbal_jax.scheduler.counts_file import load_counts
from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.serving.core.core import EngineCore
from gimbal_jax.serving.placement import files
from gimbal_jax.serving.placement.files import MAX_PENDING, CountsDump, PlacementState
from gimbal_jax.serving.placement.rebalance import Rebalancer
from gimbal_jax.serving.placement.records import ClosedWindow
from tests.serving.core.ticked_core import CONFIG, Outputs, request
from tests.serving.engine.fake_runner import FakeRunner
from tests.serving.fake_server import MODEL

ROOT = Path(__file__).parents[3]
MESH = CONFIG.mesh
META = {"model": "fake", "ranks": CONFIG.mesh.ranks}
WINDOW = ClosedWindow(
    np.ones((2, 2, 4), np.int64), np.tile(np.arange(4, dtype=np.int32), (2, 1)), steps=3, step=30, time=1.5
)


def test_window_becomes_a_file(tmp_path):
    dump = CountsDump(tmp_path / "a" / "b", "run", META)
    dump.write(WINDOW)
    dump.close()
    (path,) = (tmp_path / "a" / "b").iterdir()
    assert path.name == "run-000000030.npz"
    file = load_counts(path)
    np.testing.assert_array_equal(file.counts_WLSE, WINDOW.counts_LSE[None])
    np.testing.assert_array_equal(file.slot_of_expert_WLE, WINDOW.slot_of_expert_LE[None])
    assert file.meta == META | {"steps": 3, "step": 30, "time": 1.5}
    assert (dump.written, dump.lost) == (1, 0)


def test_server_dumps_every_window(tmp_path):
    config = replace(CONFIG, placement=PlacementConfig(policy="eplb", window_steps=2))
    dump = CountsDump(tmp_path, "run", META)
    runner = FakeRunner(MODEL, config)
    server = EngineCore(MODEL, config, runner, Rebalancer(MODEL, config, runner, windows=dump))
    outputs = Outputs(server)
    server.open()
    deadline = time.monotonic() + 60
    for i in range(6):
        server.submit(request(f"r{i}", range(1, 12), max_tokens=6, engine=i % 2, sequence=i // 2 + 1))
        # Decisions come from another thread, so tick until the last window, asked for early, is closed.
        while len(outputs.ends()) <= i or server.rebalancer.open_steps:
            assert time.monotonic() < deadline
            if len(outputs.ends()) > i:
                server.rebalancer.ask()
            server.tick(time.monotonic())
    server.stop()
    dump.close()
    written = [load_counts(path) for path in sorted(tmp_path.iterdir())]
    status = server.status()
    assert len(written) == status.placement.windows_written >= 6 and status.placement.windows_lost == 0
    total_LSE = np.sum([file.counts_WLSE.sum(axis=0) for file in written], axis=0)
    np.testing.assert_array_equal(total_LSE, status.placement.total_counts_LSE)
    assert [file.meta["step"] for file in written] == sorted({file.meta["step"] for file in written})
    assert sum(file.meta["steps"] for file in written) == status.steps.count


def write(dump: CountsDump, *steps: int) -> None:
    for step in steps:
        dump.write(replace(WINDOW, step=step))
        dump._thread.submit(lambda: None).result()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("anything")])
def test_write_errors_are_counted_and_logged_once(tmp_path, monkeypatch, caplog, error):
    def full(*_):
        raise error

    dump = CountsDump(tmp_path, "run", META)
    for first in (10, 20):
        with monkeypatch.context() as patch:
            patch.setattr(files, "save_counts", full)
            write(dump, first, first + 1, first + 2)
        write(dump, first + 3, first + 4)
    dump.close()
    assert (dump.written, dump.lost) == (4, 6)
    path = tmp_path / "run-000000010.npz"
    assert [record.getMessage() for record in caplog.records] == [
        f"windows from step 10 on are lost: {path} cannot be written: {error}",
        "windows are written again from step 13 on; 3 were lost",
        f"windows from step 20 on are lost: {path.with_name('run-000000020.npz')} cannot be written: {error}",
        "windows are written again from step 23 on; 6 were lost",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"run-0000000{step}.npz" for step in (13, 14, 23, 24)]


def test_failed_write_leaves_no_file(tmp_path):
    """The operating system limits files of the process to 100 bytes, less than a window needs."""
    code = f"""
import pathlib, resource
from tests.serving.placement.test_files import META, WINDOW, CountsDump
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
dump = CountsDump(pathlib.Path({str(tmp_path)!r}), "run", META)
for _ in range(3):
    dump.write(WINDOW)
dump.close()
print(dump.written, dump.lost)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (ended.returncode, ended.stdout) == (0, "0 3\n"), ended.stderr
    assert ended.stderr.count("File too large") == ended.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_slow_disk_drops_windows_without_blocking(tmp_path, monkeypatch, caplog):
    released = threading.Event()
    monkeypatch.setattr(files, "save_counts", lambda *_: released.wait(60))
    dump = CountsDump(tmp_path, "run", META)
    began = time.monotonic()
    for _ in range(MAX_PENDING + 3):
        dump.write(WINDOW)
    assert time.monotonic() - began < 30
    assert (dump.written, dump.lost) == (0, 3)
    assert caplog.text.count("dropped: the disk is too slow") == 1
    released.set()
    dump.close()
    assert (dump.written, dump.lost) == (MAX_PENDING, 3)


def test_folder_that_cannot_be_created_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        CountsDump(tmp_path / "file" / "dump", "run", META)


# -- placement -----------------------------------------------------------------


def test_last_placement_is_found_at_the_next_start(tmp_path):
    path = tmp_path / "new" / "placement.npz"
    first = PlacementState(path, MODEL, MESH)
    assert first.found_LE is None
    static_LE = static_placement(2, 4, MESH.ranks)
    first.keep(static_LE)
    first.keep(static_LE[:, ::-1].copy())
    first.close()
    second = PlacementState(path, MODEL, MESH)
    np.testing.assert_array_equal(second.found_LE, static_LE[:, ::-1])
    second.close()


def test_file_of_another_mesh_raises(tmp_path):
    path = tmp_path / "placement.npz"
    state = PlacementState(path, MODEL, MESH)
    state.keep(static_placement(2, 4, MESH.ranks))
    state.close()
    with pytest.raises(ValueError, match=r"on 2 ranks, not .* on 4 ranks"):
        PlacementState(path, MODEL, MeshConfig(1, 2))


def test_placement_that_cannot_be_written_is_logged(tmp_path, caplog):
    path = tmp_path / "placement.npz"
    state = PlacementState(path, MODEL, MESH)
    path.mkdir()
    state.keep(static_placement(2, 4, MESH.ranks))
    state.close()
    assert "the placement is not kept" in caplog.text
