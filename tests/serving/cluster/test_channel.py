"""The command channel over loopback: who may join, what arrives, and what both sides report of a lost process."""

import contextlib
import queue
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from gimbal_jax.cli.serve.group import command_tls
from gimbal_jax.cli.serve.options import ServeOptions
from gimbal_jax.cli.serve.processes import Processes
from gimbal_jax.serving.cluster import channel, connection
from gimbal_jax.serving.cluster.channel import LeaderChannel, join_leader
from gimbal_jax.serving.cluster.connection import HEAD, ChannelError, Connection, Kind, PeerLost
from gimbal_jax.serving.network.ports import free_port
from tests.serving.rpc.test_tls import Authority

SECRET, OTHER_SECRET = b"right-secret-0123456789", b"wrong-secret-0123456789"
FACTS = {"jax": "1", "checkpoint": "3fa2"}
WAIT_S = 120.0
"""Far more than anything takes on a busy machine."""


class Cluster:
    """A leader that gathers on one thread, and followers that join on others."""

    def __init__(self, followers: int, tls: ssl.SSLContext | None = None):
        self.port = free_port()
        self.leader = LeaderChannel(("127.0.0.1", self.port), followers, SECRET, tls)
        self.log: list[str] = []
        self.ends: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.followers: list[Connection] = []
        self._pool = ThreadPoolExecutor(16)
        self.gathered: Future[list[str]] = self._pool.submit(self.leader.gather, FACTS, WAIT_S, self.log.append)

    def join(self, process, secret=SECRET, tls=None, facts=FACTS, timeout_s=WAIT_S) -> Future[Connection]:
        def join():
            follower = join_leader(("127.0.0.1", self.port), process, secret, tls, facts, timeout_s)
            self.followers.append(follower)
            return follower

        return self._pool.submit(join)

    def watched(self, *joining: Future[Connection]) -> tuple[list[Connection], queue.SimpleQueue[str | None]]:
        """The followers, once all exchange heartbeats, and what they report of the leader's end."""
        self.gathered.result(WAIT_S)
        self.leader.watch(self.ends.put)
        leader_ends: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        followers = [follower.result(WAIT_S) for follower in joining]
        for follower in followers:
            follower.watch(leader_ends.put)
        return followers, leader_ends

    def close(self):
        self.leader.close()
        for follower in self.followers:
            follower.close()
        self._pool.shutdown()


@pytest.fixture
def cluster():
    """Makes clusters, and closes them."""
    with contextlib.ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(contextlib.closing(Cluster(*arguments)))


@pytest.fixture(autouse=True)
def patient_but_quick(monkeypatch):
    """A busy machine loses nothing, and nothing waits long between two attempts."""
    monkeypatch.setattr(connection, "SILENCE_S", WAIT_S)
    monkeypatch.setattr(connection, "BEAT_S", 0.02)
    monkeypatch.setattr(channel, "JOIN_S", WAIT_S)
    monkeypatch.setattr(channel, "TOGETHER_S", WAIT_S)
    monkeypatch.setattr(channel, "RETRY_S", 0.02)
    monkeypatch.setattr(channel, "LOOK_S", 0.02)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program")
    authority = Authority(tmp_path_factory.mktemp("authority"), "ca")
    for name in ("leader", "other"):
        authority.sign(name)
    return authority.folder


def tls_of(folder, name: str, process: int) -> ssl.SSLContext:
    options = ServeOptions("m", command_cert=folder / f"{name}.pem", command_key=folder / f"{name}.key")
    context = command_tls(Processes(2, process, ("127.0.0.1", 1), 2), options)
    assert context is not None
    return context


def until(done) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def error_of(future: Future) -> str:
    with pytest.raises(ChannelError) as error:
        future.result(WAIT_S)
    return str(error.value)


def stranger(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_each_follower_gets_its_commands_whole_and_in_order(cluster, request, encrypted):
    folder = request.getfixturevalue("authority") if encrypted else None
    leader_tls, follower_tls = (tls_of(folder, "leader", process) if encrypted else None for process in (0, 1))
    here = cluster(3, leader_tls)
    joining = [here.join(process, tls=follower_tls) for process in (1, 2, 3)]
    followers, leader_ends = here.watched(*joining)
    assert here.gathered.result() == [socket.gethostname()] * 3
    commands = [[bytes([process]) * (number**3) for process in (1, 2, 3)] for number in range(100)]  # up to 1 MB

    def send_all() -> None:
        for command in commands:
            here.leader.send(command)
        here.leader.close()

    sender = threading.Thread(target=send_all)
    sender.start()
    for index, follower in enumerate(followers):
        assert [follower.next_command() for _ in commands] == [command[index] for command in commands]
        for _ in range(2):
            with pytest.raises(PeerLost, match="process 0 has closed the channel"):
                follower.next_command()
        assert leader_ends.get(timeout=WAIT_S) is None
    sender.join()
    assert here.ends.empty() and here.log == []
    with pytest.raises(ConnectionRefusedError):
        stranger(here.port)


def test_reports_of_followers_reach_the_leader_with_heartbeats(cluster):
    here = cluster(2)
    (_, second), _ = here.watched(here.join(1), here.join(2))
    assert here.leader.reports == ["", ""]
    for text in ("1", "2"):
        second.report = text
        until(lambda text=text: here.leader.reports == ["", text])


PROGRAM = """
import sys
from gimbal_jax.serving.cluster.channel import join_leader
port, secret = int(sys.argv[1]), sys.argv[2].encode()
leader = join_leader(("127.0.0.1", port), 2, secret, None, {"jax": "1", "checkpoint": "3fa2"}, 99)
leader.watch(print)
while True:
    leader.next_command()
"""


@pytest.mark.parametrize(
    ("how", "silence_s", "reason"),
    [(signal.SIGKILL, WAIT_S, "is gone: "), (signal.SIGSTOP, 8.0, "has been silent for ")],
    ids=["killed", "stopped"],
)
def test_a_lost_process_is_reported_once_with_its_number_and_host(cluster, monkeypatch, how, silence_s, reason):
    monkeypatch.setattr(connection, "SILENCE_S", silence_s)
    here = cluster(2)
    command = [sys.executable, "-c", PROGRAM, str(here.port), SECRET.decode()]
    with subprocess.Popen(command) as process:
        try:
            first = here.join(1)
            here.gathered.result(WAIT_S)
            (follower,), leader_ends = here.watched(first)
            here.leader.send([b"do", b"do"])
            assert follower.next_command() == b"do"
            process.send_signal(how)
            found = here.ends.get(timeout=WAIT_S)
            assert found is not None and found.startswith(f"process 2 (127.0.0.1) {reason}")
            with pytest.raises(PeerLost, match=r"process 2 \(127.0.0.1\)"):
                while True:  # the system may take some more for a process that is gone
                    here.leader.send([b"do", b"do"])
            here.leader.close(found)
            assert leader_ends.get(timeout=WAIT_S) == f"process 0 has failed: {found}"
            assert here.ends.empty()
        finally:
            process.kill()


def test_a_leader_that_ends_without_a_goodbye_is_lost(cluster):
    here = cluster(1)
    (follower,), leader_ends = here.watched(here.join(1))
    here.leader._joined[1]._shut_down(socket.SHUT_RDWR)
    assert leader_ends.get(timeout=WAIT_S) == "process 0 is gone: its process has ended"
    with pytest.raises(PeerLost, match="process 0 is gone"):
        follower.next_command()


def test_a_follower_that_failed_is_lost_with_its_reason_and_one_that_finished_is_not(cluster):
    here = cluster(2)
    (first, second), _ = here.watched(here.join(1), here.join(2))
    first.close()
    assert here.ends.get(timeout=WAIT_S) is None
    second.close("its devices are gone" + "." * 100_000)
    found = here.ends.get(timeout=WAIT_S)
    assert found is not None and found.startswith("process 2 (127.0.0.1) has failed: its devices are gone.")


def test_another_secret_is_rejected_on_both_sides_and_the_wait_goes_on(cluster):
    here = cluster(1)
    reason = "the secret differs: give all processes the same secret_file"
    for _ in range(2):
        assert error_of(here.join(1, OTHER_SECRET)) == f"process 0 rejects this process: {reason}"
    here.watched(here.join(1))
    assert here.log == [f"process 1 (127.0.0.1) was rejected: {reason}"]


def test_all_differences_are_named_to_all(cluster):
    here = cluster(3)
    joining = [
        here.join(1, facts=FACTS | {"checkpoint": "91bc", "jax": "2"}),
        here.join(2),
        here.join(3, facts=FACTS | {"checkpoint": "77aa"}),
    ]
    error = error_of(here.gathered)
    assert sorted(error.splitlines()) == [
        "  checkpoint: 3fa2 in process 0, 77aa in process 3",
        "  checkpoint: 3fa2 in process 0, 91bc in process 1",
        "  jax: 1 in process 0, 2 in process 1",
        "the processes differ:",
    ]
    assert {error_of(follower) for follower in joining} == {f"process 0 rejects this process: {error}"}


def test_a_difference_does_not_wait_long_for_a_missing_process(cluster, monkeypatch):
    monkeypatch.setattr(channel, "TOGETHER_S", 0.0)
    here = cluster(2)
    follower = here.join(1, facts=FACTS | {"jax": "2"})
    error = "the processes differ:\n  jax: 1 in process 0, 2 in process 1"
    assert error_of(here.gathered) == error
    assert error_of(follower) == f"process 0 rejects this process: {error}"


class Clock:
    """The clock of the channel, which a test can move on."""

    def __init__(self):
        self.ahead_s = 0.0
        self.sleep = time.sleep

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


def test_missing_processes_are_named_to_all(monkeypatch):
    clock = Clock()
    leader = LeaderChannel(("127.0.0.1", port := free_port()), 3, SECRET, None)
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        clock.ahead_s += 1e6 if line == "waiting for processes 1, 3" else 0.0

    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(join_leader, ("127.0.0.1", port), 2, SECRET, None, FACTS, WAIT_S)
        monkeypatch.setattr(channel, "LOG_S", 0.01)
        monkeypatch.setattr(channel, "time", clock)
        with pytest.raises(ChannelError, match="processes 1, 3 did not join within 600 s"):
            leader.gather(FACTS, 600.0, log)
        assert error_of(second) == "process 0 rejects this process: processes 1, 3 did not join within 600 s"
    assert set(lines) <= {"waiting for processes 1, 2, 3", "waiting for processes 1, 3"}


def test_a_process_that_joins_twice_or_is_none_of_the_server_is_rejected(cluster):
    here = cluster(2)
    first = here.join(1)
    until(lambda: here.leader._joined)
    error = "it has joined already, or is not one of 3 processes"
    for process in (0, 1, 3):
        assert error_of(here.join(process)) == f"process 0 rejects this process: {error}"
        until(lambda line=f"process {process} (127.0.0.1) was rejected: {error}": line in here.log)
    here.watched(first, here.join(2))


def test_strangers_do_not_disturb(cluster, monkeypatch):
    monkeypatch.setattr(channel, "MAX_THREADS", threading.active_count() + 10)
    here = cluster(1)
    silent = [stranger(here.port) for _ in range(4)]
    for garbage in (b"", b"", b"GET / HTTP/1.1\r\nHost: gimbal\r\n\r\n" + bytes(2**20), HEAD.pack(2**16, 0)):
        with stranger(here.port) as other, contextlib.suppress(OSError):
            other.sendall(garbage)
            other.shutdown(socket.SHUT_WR)
            other.recv(1)  # until the leader has closed
    (follower,), _ = here.watched(here.join(1))  # while the silent ones are still connected
    here.leader.send([b"do"])
    assert follower.next_command() == b"do"
    assert len(here.log) == 2
    assert all(line.startswith("a connection was rejected: a process on 127.0.0.1 ") for line in here.log)
    for each in silent:
        each.close()


def test_more_strangers_than_the_leader_reads_at_a_time_only_delay_it(cluster, monkeypatch):
    monkeypatch.setattr(channel, "JOIN_S", 0.5)
    monkeypatch.setattr(channel, "MAX_THREADS", threading.active_count() + 4)
    here = cluster(1)
    silent = [stranger(here.port) for _ in range(6)]
    here.watched(here.join(1))
    for each in silent:
        each.close()


def test_a_message_that_is_too_long_is_neither_sent_nor_read(cluster, monkeypatch):
    here = cluster(1)
    (follower,), _ = here.watched(here.join(1))
    monkeypatch.setattr(connection, "MAX_COMMAND_BYTES", 100_000)
    with pytest.raises(ValueError, match="a message of 100,001 bytes: must have at most 100,000"):
        here.leader.send([bytes(100_001)])
    follower.send(Kind.COMMAND, bytes(2**16 + 1))  # more than the leader takes
    found = here.ends.get(timeout=WAIT_S)
    assert found == "process 1 (127.0.0.1) began a message of 65,537 bytes: must have at most 65,536"


def test_a_follower_accepts_one_certificate_and_no_plain_leader(cluster, authority, monkeypatch):
    here = cluster(1, tls_of(authority, "leader", 0))
    error = "process 0 does not have the certificate of command_cert: "
    assert error_of(here.join(1, tls=tls_of(authority, "other", 1))).startswith(error)
    assert error_of(here.join(1, timeout_s=0.0)).endswith("(do both use TLS, or neither?)")
    here.watched(here.join(1, tls=tls_of(authority, "leader", 1)))
    plain = cluster(1)
    assert error_of(plain.join(1, tls=tls_of(authority, "leader", 1), timeout_s=0.0)).endswith("or neither?)")
    plain.watched(plain.join(1))


def test_a_follower_waits_for_a_leader_that_starts_later(monkeypatch):
    address = "127.0.0.1", free_port()
    clock = Clock()
    tried = threading.Event()
    clock.sleep = lambda seconds: tried.set()
    monkeypatch.setattr(channel, "time", clock)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(join_leader, address, 1, SECRET, None, FACTS, WAIT_S)
        assert tried.wait(WAIT_S)
        leader = LeaderChannel(address, 1, SECRET, None)
        leader.gather(FACTS, WAIT_S, pytest.fail)
        early.result(WAIT_S).close()
        leader.close()
    with pytest.raises(ChannelError, match=rf"did not accept .* at 127\.0\.0\.1:{address[1]} .*Connection refused"):
        join_leader(address, 1, SECRET, None, FACTS, 0.0)


def test_a_port_in_use_is_named(cluster):
    port = cluster(1).port
    with pytest.raises(OSError, match=rf"cannot listen for commands on 127\.0\.0\.1:{port}: Address already in use"):
        LeaderChannel(("127.0.0.1", port), 1, SECRET, None)
