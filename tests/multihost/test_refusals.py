"""Processes that differ are rejected at the start, with a message that names the difference, and none waits forever."""

import shutil
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.multihost.processes import Process, started, wait
from tests.multihost.rig import FOLDER, printed, secret_file, serve_commands

END_S = 600
MESH = ("--dp", "2", "--tp", "1")


@pytest.fixture
def commands(tmp_path):
    """Two processes of one device each that would serve together."""
    return serve_commands(tmp_path, 2, 1, MESH)


def rejected(commands: list[list[str]]) -> list[str]:
    """What both processes print when they have ended with errors."""
    with started(commands) as running:
        assert wait(running, END_S) == [2, 2], printed(running)
        return [process.output() for process in running]


def until_printed(process: Process, text: str) -> None:
    deadline = time.monotonic() + END_S
    while text not in process.output():
        assert time.monotonic() < deadline, process.output()
        time.sleep(0.05)


def other_checkpoint(folder: Path) -> Path:
    """The same architecture with other weights, as another fine-tune has."""
    shutil.copytree(FOLDER, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor + np.float32(0.5).astype(tensor.dtype) for name, tensor in tensors.items()}, file)
    return folder


def test_both_processes_name_all_differences(tmp_path, commands):
    commands[1][2] = str(other_checkpoint(tmp_path / "base"))
    commands[1] += ["--max-rows", "4"]
    for output in rejected(commands):
        assert "the processes differ" in output
        assert "checkpoint: " in output
        assert "engine.max_rows: 2 in process 0, 4 in process 1" in output


def test_both_processes_report_another_secret(tmp_path, commands):
    other = tmp_path / "other"
    other.mkdir()
    commands[1][commands[1].index("--secret-file") + 1] = str(secret_file(other, "another secret of theirs"))
    with started(commands) as running:
        leader, follower = running
        assert wait([follower], END_S) == [2], printed(running)
        assert "process 0 rejects this process: the secret differs" in follower.output()
        until_printed(leader, "process 1 (127.0.0.1) was rejected: the secret differs")


def test_a_port_in_use_is_reported_before_the_leader_waits(commands):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        leader = commands[0]
        leader[leader.index("--command-port") + 1] = port
        with started([leader]) as running:
            assert wait(running, END_S) == [2]
            assert f"process 0 cannot listen on 127.0.0.1:{port}: Address already in use" in running[0].output()
