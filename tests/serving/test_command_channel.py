"""One leader and its followers over loopback: who is let in, who is sent away and with which words, who is lost."""

import contextlib
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from gimbal_jax.serving import command_channel, command_door, command_link
from gimbal_jax.serving.command_channel import FollowerChannel, LeaderChannel
from gimbal_jax.serving.command_handshake import follower_tls, leader_tls
from gimbal_jax.serving.command_link import FRAME_BYTES, ChannelError, PeerLost
from gimbal_jax.serving.network.ports import free_port
from tests.serving.rpc.test_tls import Authority

SECRET, OTHER = b"right-secret-0123456789", b"wrong-secret-0123456789"
FACTS = {"jax": "1", "checkpoint": "3fa2"}
WAIT_S = 20.0


class Room:
    """A leader that waits for followers on one thread, and attempts of followers on others."""

    def __init__(self, followers: int, tls=None, timeout_s=WAIT_S, port=0):
        self.leader = LeaderChannel(("127.0.0.1", port), followers, SECRET, tls)
        self.port = self.leader.port
        self.said: list[str] = []
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(8)
        self.gathered = self._pool.submit(self.leader.gather, FACTS, timeout_s, self.said.append)
        self.channels: list[FollowerChannel] = []

    def follow(self, process, secret=SECRET, tls=None, facts=FACTS, timeout_s=WAIT_S) -> Future[FollowerChannel]:
        def connect():
            announced = {"host": f"host-{process}"}
            channel = FollowerChannel.connect(
                ("127.0.0.1", self.port), process, secret, tls, facts, announced, timeout_s
            )
            self.channels.append(channel)
            return channel

        return self._pool.submit(connect)

    def until_said(self, words: str) -> None:
        until(lambda: any(words in line for line in self.said))

    def watched(self, *followers: Future[FollowerChannel]) -> list[FollowerChannel]:
        """The followers, when all are there and heartbeats go."""
        self.gathered.result(WAIT_S)
        self.leader.watch(self.lost.put)
        channels = [follower.result(WAIT_S) for follower in followers]
        for channel in channels:
            channel.watch(lambda words: None)
        return channels

    def close(self):
        for channel in self.channels:
            channel.close()
        self.leader.close()
        self._pool.shutdown()


@pytest.fixture
def room():
    """Makes rooms, and closes them."""
    with contextlib.ExitStack() as stack:
        yield lambda *arguments, **more: stack.enter_context(contextlib.closing(Room(*arguments, **more)))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(command_channel, "RETRY_S", 0.05)
    monkeypatch.setattr(command_channel, "LOOK_S", 0.02)
    monkeypatch.setattr(command_channel, "GRACE_S", 0.5)
    monkeypatch.setattr(command_channel, "LINGER_S", 0.3)


def until(done) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def words_of(future: Future) -> str:
    with pytest.raises(ChannelError) as error:
        future.result(WAIT_S)
    return str(error.value)


def connection(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def test_each_follower_gets_its_own_commands_in_order(room):
    hall = room(3)
    followers = [hall.follow(process) for process in (3, 1, 2)]
    assert hall.gathered.result(WAIT_S) == [{"host": f"host-{process}"} for process in (1, 2, 3)]
    third, first, second = hall.watched(*followers)
    for number in range(100):
        hall.leader.send([b"%d for %d" % (number, process) for process in (1, 2, 3)])
    for process, channel in ((1, first), (2, second), (3, third)):
        assert [channel.receive() for _ in range(100)] == [b"%d for %d" % (number, process) for number in range(100)]
    assert hall.leader.bytes_sent == 3 * sum(FRAME_BYTES + len(b"%d for 1" % number) for number in range(100))
    assert hall.said == []
    with pytest.raises(ConnectionRefusedError):  # nobody else comes in
        connection(hall.port)


def test_announcements_come_with_heartbeats(room, monkeypatch):
    monkeypatch.setattr(command_link, "BEAT_S", 0.02)
    hall = room(2)
    _, second = hall.watched(hall.follow(1), hall.follow(2))
    assert hall.leader.announced == ["", ""]
    for text in ("1", "2"):
        second.announce(text)
        until(lambda text=text: hall.leader.announced == ["", text])


def test_a_follower_waits_for_a_leader_that_starts_later(room):
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(FollowerChannel.connect, ("127.0.0.1", port), 1, SECRET, None, FACTS, {}, WAIT_S)
        time.sleep(0.3)
        hall = room(1, port=port)
        assert hall.gathered.result(WAIT_S) == [{}]
        early.result(WAIT_S).close()


def test_a_follower_whose_leader_never_comes_says_where_it_looked():
    port = free_port()
    with pytest.raises(ChannelError, match=rf"no process 0 .*127\.0\.0\.1:{port} within 0\.2 s: .*Connection refused"):
        FollowerChannel.connect(("127.0.0.1", port), 1, SECRET, None, FACTS, {}, 0.2)


def test_another_secret_is_said_to_both_and_the_wait_goes_on(room):
    hall = room(1)
    words = "the secret differs from that of process 0: give all processes the same secret_file"
    for _ in range(2):
        assert words_of(hall.follow(1, OTHER)) == words
    assert hall.watched(hall.follow(1))
    assert hall.said == ["127.0.0.1 is no process of ours: it says that it is process 1, but has another secret"]


def test_all_differences_are_said_by_process_and_name_to_all(room):
    hall = room(4)
    others = [
        hall.follow(1, facts=FACTS | {"checkpoint": "91bc", "jax": "2"}),
        hall.follow(2),
        hall.follow(3, facts=FACTS | {"checkpoint": "77aa"}),
    ]  # the fourth never comes, and is not waited for
    words = words_of(hall.gathered)
    assert words.splitlines()[0] == "the processes differ:"
    assert sorted(words.splitlines()[1:]) == [
        "  checkpoint: 3fa2 in process 0, 77aa in process 3",
        "  checkpoint: 3fa2 in process 0, 91bc in process 1",
        "  jax: 1 in process 0, 2 in process 1",
    ]
    assert {words_of(other) for other in others} == {f"process 0 refuses this one: {words}"}


def test_who_did_not_come_is_named_to_all(room, monkeypatch):
    monkeypatch.setattr(command_channel, "SAY_S", 0.3)
    hall = room(3, timeout_s=0.8)
    second = hall.follow(2)
    assert words_of(hall.gathered) == "processes 1, 3 did not come within 0.8 s"
    assert words_of(second) == "process 0 refuses this one: processes 1, 3 did not come within 0.8 s"
    assert set(hall.said) == {"waiting for processes 1, 3"}


def test_a_second_process_of_an_index_and_one_out_of_range_are_sent_away(room):
    hall = room(2)
    first = hall.follow(1)
    time.sleep(0.2)
    taken, unknown = (
        "process 1 is here already: process 1 (127.0.0.1)",
        "there is no process {} to wait for: there are 3",
    )
    assert words_of(hall.follow(1)) == f"process 0 refuses this one: {taken}"
    for process in (0, 3):
        assert words_of(hall.follow(process)).startswith(f"process 0 refuses this one: {unknown.format(process)}")
    assert len(hall.watched(first, hall.follow(2))) == 2
    assert hall.said[0] == f"process 1 (127.0.0.1) is sent away: {taken}"


def test_one_that_leaves_while_it_waits_may_come_again(room):
    hall = room(2)
    words = words_of(hall.follow(1, timeout_s=0.4))
    assert words.endswith("within 0.4 s: it is there, but the others are not")
    hall.until_said("process 1 (127.0.0.1) is gone: its process has ended; waiting for it to come again")
    assert len(hall.watched(hall.follow(1), hall.follow(2))) == 2


def test_strangers_are_said_once_and_delay_nobody(room, monkeypatch):
    monkeypatch.setattr(command_door, "HANDSHAKE_S", 0.5)
    monkeypatch.setattr(command_door, "MAX_HANDSHAKES", 6)
    hall = room(1)
    slow = [connection(hall.port) for _ in range(4)]
    for garbage in (b"", b"", b"GET / HTTP/1.1\r\nHost: gimbal\r\n\r\n" + bytes(2**20)):
        with connection(hall.port) as stranger, contextlib.suppress(OSError):
            stranger.sendall(garbage)
            stranger.shutdown(socket.SHUT_WR)
            stranger.recv(1)  # until the other end has had enough
    began = time.monotonic()
    (channel,) = hall.watched(hall.follow(1))
    assert time.monotonic() - began < 0.4  # no slow one was waited for
    assert sorted(hall.said) == [
        "127.0.0.1 is no process of ours: it does not speak as processes of this version of gimbal_jax do",
        "127.0.0.1 is no process of ours: it hung up",
    ]
    hall.leader.send([b"do"])
    assert channel.receive() == b"do"
    for stranger in slow:
        with stranger:
            assert stranger.recv(1) == b""


def test_more_slow_strangers_than_may_prove_themselves_at_once_only_delay(room, monkeypatch):
    monkeypatch.setattr(command_door, "HANDSHAKE_S", 0.3)
    monkeypatch.setattr(command_door, "MAX_HANDSHAKES", 2)
    hall = room(1)
    slow = [connection(hall.port) for _ in range(5)]
    assert hall.watched(hall.follow(1))
    assert hall.said == ["127.0.0.1 did not say who it is within 0.3 s"]
    for stranger in slow:
        stranger.close()


def test_closing_ends_the_wait_and_says_so(room):
    hall = room(2)
    first = hall.follow(1)
    time.sleep(0.2)
    hall.leader.close()
    assert words_of(hall.gathered) == "process 0 stopped waiting"
    assert words_of(first) == "process 0 refuses this one: process 0 stopped waiting"


def test_a_port_in_use_is_named(room):
    port = room(1).port
    with pytest.raises(OSError, match=rf"cannot listen for commands on 127\.0\.0\.1:{port}: Address already in use"):
        LeaderChannel(("127.0.0.1", port), 1, SECRET, None)
    with pytest.raises(OSError, match=r"cannot listen for commands on 192\.0\.2\.1:9: "):
        LeaderChannel(("192.0.2.1", 9), 1, SECRET, None)


def test_a_channel_that_gathered_nobody_closes():
    leader = LeaderChannel(("127.0.0.1", 0), 1, SECRET, None)
    port = leader.port
    leader.close()
    LeaderChannel(("127.0.0.1", port), 1, SECRET, None).close()


PROGRAM = """
import sys
from gimbal_jax.serving.command_channel import FollowerChannel
channel = FollowerChannel.connect(("127.0.0.1", int(sys.argv[1])), 2, sys.argv[2].encode(), None, {}, {}, 20)
channel.watch(print)
while True:
    channel.receive()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_process_is_told_once_by_name(how, monkeypatch):
    monkeypatch.setattr(command_link, "SILENCE_S", 2.5)  # here alone: the other process beats once a second
    leader = LeaderChannel(("127.0.0.1", 0), 2, SECRET, None)
    command = [sys.executable, "-c", PROGRAM, str(leader.port), SECRET.decode()]
    with subprocess.Popen(command) as process, ThreadPoolExecutor(1) as pool:
        port = leader.port
        first = pool.submit(FollowerChannel.connect, ("127.0.0.1", port), 1, SECRET, None, {}, {}, WAIT_S)
        try:
            leader.gather({}, WAIT_S, pytest.fail)
            lost: queue.SimpleQueue[str] = queue.SimpleQueue()
            leader.watch(lost.put)
            first.result().watch(lost.put)
            leader.send([b"do", b"do"])
            process.send_signal(how)
            began = time.monotonic()
            words = "is gone: " if how is signal.SIGKILL else "has been silent for 2.5 s: "
            assert lost.get(timeout=8).startswith(f"process 2 (127.0.0.1) {words}")
            assert time.monotonic() - began < (0.5 if how is signal.SIGKILL else 4.5)
            with pytest.raises(PeerLost, match="process 2"):
                leader.send([b"do", b"do"])
            with pytest.raises(queue.Empty):
                lost.get(timeout=0.2)
        finally:
            process.kill()
            leader.close("process 2 is lost")
            with pytest.raises(PeerLost, match="process 0 has failed: process 2 is lost"):
                while True:
                    first.result().receive()
            first.result().close()


def test_a_follower_that_closes_is_not_lost_and_one_that_failed_is_with_its_words(room):
    hall = room(2)
    first, second = hall.watched(hall.follow(1), hall.follow(2))
    first.close()
    second.close("its devices are gone")
    assert hall.lost.get(timeout=2) == "process 2 (127.0.0.1) has failed: its devices are gone"
    with pytest.raises(queue.Empty):
        hall.lost.get(timeout=0.3)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program")
    authority = Authority(tmp_path_factory.mktemp("authority"), "ca")
    for name in ("leader", "other"):
        authority.sign(name)
    return authority.folder


def test_commands_go_by_tls_to_who_knows_the_certificate(room, authority, monkeypatch):
    monkeypatch.setattr(command_link, "BEAT_S", 0.001)  # both directions at once, all the time
    hall = room(2, leader_tls(authority / "leader.pem", authority / "leader.key"))
    with pytest.raises(ChannelError, match="process 0 shows another certificate than command_cert: "):
        hall.follow(1, tls=follower_tls(authority / "other.pem")).result(WAIT_S)
    plain = words_of(hall.follow(1, timeout_s=0.2))
    assert plain.endswith("; do both use TLS, or neither?")
    tls = follower_tls(authority / "leader.pem")
    channels = hall.watched(hall.follow(1, tls=tls), hall.follow(2, tls=tls))
    messages = [bytes([number % 256]) * (number * 50) for number in range(300)]
    sender = threading.Thread(target=lambda: [hall.leader.send([message] * 2) for message in messages])
    sender.start()
    for channel in channels:
        assert [channel.receive() for _ in messages] == messages
    sender.join()
    hall.leader.send([b"stop"] * 2)
    hall.leader.close()
    for channel in channels:
        assert channel.receive() == b"stop"
        with pytest.raises(PeerLost, match="process 0 has closed the channel"):
            channel.receive()
    assert hall.lost.empty()


def test_a_leader_without_tls_and_a_follower_with_it_do_not_meet(room, authority):
    hall = room(1)
    words = words_of(hall.follow(1, tls=follower_tls(authority / "leader.pem"), timeout_s=0.2))
    assert words.endswith("; do both use TLS, or neither?")
    assert hall.watched(hall.follow(1))
