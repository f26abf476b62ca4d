"""Processes that do not belong together are refused at the start, by name, and nobody is left waiting."""

import shutil
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.multihost.processes import started, wait
from tests.multihost.rig import FOLDER, printed, secret_file, serve_commands

END_S = 120
MESH = ("--dp", "2", "--tp", "1")


@pytest.fixture
def commands(tmp_path):
    """Two processes of one device each that would serve together."""
    return serve_commands(tmp_path, 2, 1, MESH)


def refused(commands: list[list[str]]) -> list[str]:
    """What both processes say when they have ended with errors."""
    began = time.monotonic()
    with started(commands) as running:
        codes = wait(running, END_S)
        assert codes == [2, 2], (codes, printed(running))
        assert time.monotonic() - began < END_S
        return [process.output() for process in running]


def other_checkpoint(folder: Path) -> Path:
    """The same architecture with other weights, as another fine-tune has."""
    shutil.copytree(FOLDER, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor + np.float32(0.5).astype(tensor.dtype) for name, tensor in tensors.items()}, file)
    return folder


def test_what_differs_is_named_in_both(tmp_path, commands):
    commands[1][2] = str(other_checkpoint(tmp_path / "base"))
    commands[1] += ["--max-rows", "4"]
    for said in refused(commands):
        assert "the processes differ" in said
        assert "checkpoint: " in said
        assert "engine.max_rows: 2 in process 0, 4 in process 1" in said


def test_another_secret_is_no_process_of_ours(tmp_path, commands):
    other = tmp_path / "other"
    other.mkdir()
    commands[1][commands[1].index("--secret-file") + 1] = str(secret_file(other, "another secret of theirs"))
    with started(commands) as running:
        codes = wait(running, END_S)
        assert codes[1] == 2, printed(running)
        assert "secret" in running[1].output().lower()
        assert "secret" in running[0].output().lower()


def test_a_port_in_use_is_said_before_anybody_waits(commands):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        leader = commands[0]
        leader[leader.index("--command-port") + 1] = port
        with started([leader]) as running:
            assert wait(running, END_S) == [2]
            assert f"process 0 cannot listen on 127.0.0.1:{port}: Address already in use" in running[0].output()
