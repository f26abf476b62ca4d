"""``gimbal top`` against a live server: one frame, a real terminal, and errors."""

import fcntl
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time

import pytest
from typer.testing import CliRunner

from gimbal_jax.cli import top as top_command
from gimbal_jax.cli.main import app
from gimbal_jax.cli.top import NoAnswer, data_address, fetch
from tests.serving.fake_server import FakeCore
from tests.serving.live_server import live_server
from tests.serving.monitoring.test_dashboard import page_with, snapshot_of

# Where this suite runs in the background, its children inherit that interrupts are ignored.
PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from gimbal_jax.cli.main import app
app()
"""
ENTER, LEAVE, HOME = "\x1b[?1049h", "\x1b[?1049l", "\x1b[H"


@pytest.fixture(scope="module")
def server():
    with live_server("small \x1b[31mred\x07 [bold]model") as live:
        for future in [live.generate(f"r{number}", max_tokens=10) for number in range(8)]:
            future.result(60)
        yield live


def top(*arguments):
    return CliRunner().invoke(app, ["top", *arguments], env={"COLUMNS": "100", "TERM": "dumb"})


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *arguments, columns=100, lines=30):
        self.screen, inside = pty.openpty()
        self.resize(columns, lines)
        command = [sys.executable, "-c", PROGRAM, *arguments]
        # A size in the environment would hide that of the terminal.
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        environment["TERM"] = "xterm-256color"
        self.process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env=environment)
        os.close(inside)
        self.text = ""

    def resize(self, columns, lines):
        fcntl.ioctl(self.screen, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def until(self, condition, timeout_s=60.0):
        """Reads until the condition of all text since the last call holds; returns that text."""
        deadline = time.monotonic() + timeout_s
        while not condition(self.text):
            assert time.monotonic() < deadline, self.text[-2000:]
            if select.select([self.screen], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.screen, 65536).decode(errors="replace")
                except OSError:  # it ended
                    break
        text, self.text = self.text, ""
        return text

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.screen)


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def fits(text, columns):
    """Whether the last frame drawn is whole and no wider."""
    last = plain(text.rpartition(HOME)[2]).replace("\r", "")
    return "placement:" in last and max(map(len, last.split("\n"))) <= columns


def test_once_prints_a_frame_and_ends(server):
    result = top(server.url, "--once")
    assert result.exit_code == 0, result.output
    assert "● serving" in result.output and "2 x 2 = 4 ranks" in result.output
    assert "rank imbalance" in result.output and "placement:" in result.output
    assert len([line for line in result.output.splitlines() if re.match(r"^ +[01]  +\d", line)]) >= 2
    assert max(map(len, result.output.splitlines())) <= 100


def test_text_of_others_does_not_steer_the_terminal(server):
    result = top(server.url, "--once")
    assert "gimbal small ?[31mred? [bold]model" in result.output
    assert "\x1b" not in result.output and "\x07" not in result.output


def test_in_a_terminal_it_follows_its_size_and_q_ends_it(server):
    terminal = Terminal("top", server.url)
    try:
        first = terminal.until(lambda text: "placement:" in plain(text))
        assert ENTER in first and "serving" in plain(first)
        terminal.resize(60, 40)
        terminal.until(lambda text: fits(text, 60))
        os.write(terminal.screen, b"q")
        last = terminal.until(lambda text: LEAVE in text)
        assert LEAVE in last
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()


def test_interrupt_ends_it_cleanly_and_a_lost_server_does_not(tmp_path):
    snapshot = snapshot_of(FakeCore())
    lost: list[bool] = []
    with page_with("", lambda: None if lost else snapshot) as url:
        terminal = Terminal("top", url.removesuffix("/dashboard"))
        try:
            terminal.until(lambda text: "serving" in plain(text))
            lost.append(True)
            text = terminal.until(lambda text: "connection lost" in plain(text))
            lost.clear()
            terminal.until(lambda text: "serving" in plain(text))
            terminal.process.send_signal(signal.SIGINT)
            text = terminal.until(lambda text: LEAVE in text)
            assert "Traceback" not in text
            assert terminal.process.wait(60) == 0
        finally:
            terminal.close()


def test_nobody_answers():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        result = top(f"http://127.0.0.1:{held.getsockname()[1]}")
    assert result.exit_code == 2
    assert "error: no answer from http://127.0.0.1:" in result.output
    assert "Connection refused" in result.output and "--operators-port" in result.output


def test_something_else_answers(server, monkeypatch):
    assert top(f"{server.url}/metrics").exit_code == 2
    with pytest.raises(NoAnswer, match="answers 404"):
        fetch(f"{server.url}/elsewhere")
    with pytest.raises(NoAnswer, match="no live view"):
        fetch(f"{server.url}/health")
    with page_with("", lambda: {"other": 1}) as url, pytest.raises(NoAnswer, match="no live view"):
        fetch(data_address(url))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(top_command, "TIMEOUT_S", 0.2)
        with pytest.raises(NoAnswer, match="timed out"):
            fetch(data_address(f"127.0.0.1:{silent.getsockname()[1]}"))


def test_addresses():
    data = "http://127.0.0.1:9090/dashboard/data"
    urls = [f"{start}127.0.0.1:9090{end}" for start in ("", "http://") for end in ("", "/", "/dashboard")]
    assert {data_address(url) for url in urls} == {data}
    assert data_address("https://gpu/metrics/") == "https://gpu/metrics/dashboard/data"
    result = top("file:///etc/passwd")
    assert result.exit_code == 2 and "must begin with http://" in result.output
