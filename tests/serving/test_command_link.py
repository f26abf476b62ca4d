"""Links over real sockets: what arrives, what does not, and when the other end counts as lost."""

import contextlib
import queue
import random
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gimbal_jax.serving import command_link
from gimbal_jax.serving.command_handshake import follower_tls, leader_tls
from gimbal_jax.serving.command_link import FRAME_BYTES, ChannelError, Keys, Kind, Link, PeerLost
from tests.serving.rpc.test_tls import Authority

LEADS, FOLLOWS = b"leads" * 8, b"follows" * 8


def sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


@pytest.fixture
def ends():
    """Links of a leader and of a follower, to each other."""
    near, far = sockets()
    links = Link(near, "process 1", Keys(LEADS, FOLLOWS)), Link(far, "process 0", Keys(FOLLOWS, LEADS))
    yield links
    for link in links[::-1]:
        link.close()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(command_link, "BEAT_S", 0.05)
    monkeypatch.setattr(command_link, "SILENCE_S", 0.4)


@pytest.fixture
def quick_beats(monkeypatch):
    monkeypatch.setattr(command_link, "BEAT_S", 0.05)
    monkeypatch.setattr(command_link, "SILENCE_S", 1.0)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program")
    authority = Authority(tmp_path_factory.mktemp("authority"), "ca")
    authority.sign("leader")
    return authority.folder


def running(function, *arguments) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def watched(links) -> list[str]:
    """What is said of lost ends."""
    lost: list[str] = []
    for link in links:
        link.watch(lost.append)
    return lost


def waiting(link) -> queue.SimpleQueue:
    """Gets what a thread that waits for frames receives, or why it got nothing."""
    found: queue.SimpleQueue = queue.SimpleQueue()

    def wait():
        try:
            found.put(link.receive())
        except PeerLost as error:
            found.put(str(error))

    running(wait)
    return found


def raw_frames(count: int) -> list[bytes]:
    """The bytes of a leader's first frames, each a command that holds its number."""
    near, far = sockets()
    with near, far:
        link = Link(near, "process 1", Keys(LEADS, FOLLOWS))
        for number in range(count):
            link.send(Kind.COMMAND, bytes([number]))
        link.close()
        with far.makefile("rb") as file:
            data = file.read()
    size = FRAME_BYTES + 1
    return [data[at : at + size] for at in range(0, len(data), size)]


def received(data: bytes) -> list[bytes]:
    """What a follower takes of the bytes that come from its leader, until it takes nothing more."""
    near, far = sockets()
    with near:
        near.sendall(data)
        link = Link(far, "process 0", Keys(FOLLOWS, LEADS))
        found = []
        with contextlib.suppress(PeerLost):
            while True:
                found.append(link.receive(0.02)[1])
        link.close()
        return found


def test_frames_of_any_length_arrive_whole_and_in_order_both_ways(ends):
    leader, follower = ends
    draw = random.Random(0)
    sizes = [0, 1, FRAME_BYTES, 65_535, 65_536, 65_537, 3_000_000, *(draw.randrange(2_000) for _ in range(300))]
    messages = [draw.randbytes(size) for size in sizes]
    lost = watched(ends)
    for here, there in ((leader, follower), (follower, leader)):
        thread = running(lambda here=here: [here.send(Kind.COMMAND, message) for message in messages])
        assert [there.receive() for _ in messages] == [(Kind.COMMAND, message) for message in messages]
        thread.join()
    assert lost == []


def test_no_changed_byte_is_taken():
    whole = raw_frames(1)[0]
    assert received(whole) == [b"\0"]
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1
        assert received(bytes(changed)) == []


def test_frames_count_once_and_in_their_order():
    first, second, third = raw_frames(3)
    assert received(first + second + third) == [b"\0", b"\1", b"\2"]
    assert received(first + first) == [b"\0"]
    assert received(first + third) == [b"\0"]
    assert received(second + first) == []


def test_frames_thrown_back_are_none_of_the_other_end():
    near, far = sockets()
    link = Link(near, "process 1", Keys(LEADS, FOLLOWS))
    link.send(Kind.COMMAND, b"do")
    far.sendall(far.recv(100))
    with far, pytest.raises(PeerLost, match="what came from process 1 was changed on its way"):
        link.receive()
    link.close()


def test_lengths_have_a_limit_on_both_sides(ends, monkeypatch):
    leader, follower = ends
    leader.send(Kind.COMMAND, bytes(11))
    monkeypatch.setattr(command_link, "MAX_FRAME_BYTES", 10)
    with pytest.raises(ValueError, match="a frame of 11 bytes: at most 10"):
        leader.send(Kind.COMMAND, bytes(11))
    with pytest.raises(PeerLost, match="process 0 began a frame of 11 bytes: at most 10"):
        follower.receive()


@pytest.mark.usefixtures("quick_beats")
def test_heartbeats_keep_idle_and_busy_ends_together(ends):
    leader, follower = ends
    follower.announcement = "7 late"
    lost = watched(ends)
    found = waiting(follower)
    time.sleep(1.3)  # the leader is busy with something else, the follower waits
    assert leader.announced == "7 late"
    leader.send(Kind.COMMAND, b"do")
    assert found.get(timeout=1) == (Kind.COMMAND, b"do")
    time.sleep(1.3)  # both are busy
    leader.send(Kind.COMMAND, b"more")
    assert follower.receive() == (Kind.COMMAND, b"more")
    assert lost == []


@pytest.mark.usefixtures("quick")
def test_silence_is_a_loss_to_who_waits_and_told_once_to_who_does_not(ends):
    leader, follower = ends  # neither sends heartbeats of its own accord
    began = time.monotonic()
    with pytest.raises(PeerLost, match=r"process 1 has been silent for 0\.4 s: its machine or the network"):
        leader.receive()
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    follower._heard = time.monotonic()
    leader_socket = leader._socket.dup()  # still open, so that no end of the connection is seen
    with leader_socket:
        follower.watch(lost.put)
        lost.get(timeout=2)
    assert time.monotonic() - began < 1.5
    with pytest.raises(queue.Empty):
        lost.get(timeout=0.3)
    with pytest.raises(PeerLost):
        follower.receive()


def test_the_end_of_the_other_process_is_seen_at_once_by_who_waits(ends):
    leader, follower = ends
    began, found = time.monotonic(), waiting(follower)
    leader._socket.shutdown(socket.SHUT_WR)  # as the system does when it is killed
    assert found.get(timeout=2) == "process 0 is gone: its process has ended"
    assert time.monotonic() - began < command_link.BEAT_S / 2
    with pytest.raises(ChannelError, match="process 0 is gone"):
        follower.send(Kind.COMMAND, b"do")


def test_and_by_who_is_busy(ends):
    leader, follower = ends
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    follower.watch(lost.put)
    time.sleep(0.2)  # its first heartbeat is over
    began = time.monotonic()
    leader._socket.shutdown(socket.SHUT_WR)
    assert lost.get(timeout=2) == "process 0 is gone: its process has ended"
    assert time.monotonic() - began < command_link.BEAT_S / 2


@pytest.mark.usefixtures("quick")
def test_an_end_that_takes_nothing_is_lost_after_the_silence_limit(ends):
    leader, _ = ends
    began = time.monotonic()
    with pytest.raises(PeerLost, match=r"process 1 has taken nothing for 0\.4 s"):
        leader.send(Kind.COMMAND, bytes(20_000_000))
    assert 0.35 < time.monotonic() - began < 2


@pytest.mark.usefixtures("quick")
def test_an_end_that_takes_little_at_a_time_is_not_lost():
    near, far = sockets()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
    far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    link = Link(near, "process 1", Keys(LEADS, FOLLOWS))

    def take_slowly():
        while far.recv(100_000, socket.MSG_WAITALL):
            time.sleep(0.04)

    thread = running(take_slowly)
    began = time.monotonic()
    link.send(Kind.COMMAND, bytes(2_000_000))
    assert time.monotonic() - began > command_link.SILENCE_S
    link.close()
    thread.join()
    far.close()


@pytest.mark.usefixtures("quick_beats")
def test_what_comes_to_a_busy_end_blocks_nobody_and_waits_for_it(ends):
    leader, follower = ends
    lost = watched(ends)
    messages = [bytes([number]) * 3_000_000 for number in range(5)]
    for message in messages:
        leader.send(Kind.COMMAND, message)
    assert [follower.receive()[1] for _ in messages] == messages
    assert lost == []


@pytest.mark.parametrize("busy", [False, True])
def test_goodbye_cuts_nothing_off_and_is_no_loss(ends, busy):
    leader, follower = ends
    lost = watched(ends)
    found: list[bytes] = []

    def follow():
        with contextlib.suppress(PeerLost):
            while True:
                if busy and not found:
                    time.sleep(0.3)
                found.append(follower.receive()[1])
        follower.close()

    thread = running(follow)
    messages = [bytes(1_000_000), b"stop"]
    for message in messages:
        leader.send(Kind.COMMAND, message)
    leader.say_goodbye()
    leader.close(time.monotonic() + 2)
    thread.join()
    assert found == messages
    assert lost == []
    with pytest.raises(PeerLost, match="process 0 has closed the channel"):
        follower.receive()


@pytest.mark.parametrize("tls", [False, True])
def test_what_is_under_way_at_a_goodbye_arrives_though_the_other_end_still_speaks(tls, request):
    near, far = sockets()
    if tls:
        folder = request.getfixturevalue("authority")
        with ThreadPoolExecutor(1) as pool:
            server = leader_tls(folder / "leader.pem", folder / "leader.key")
            wrapped = pool.submit(server.wrap_socket, near, server_side=True)
            far = follower_tls(folder / "leader.pem").wrap_socket(far)
            near = wrapped.result()
    leader, follower = Link(near, "process 1", Keys(LEADS, FOLLOWS)), Link(far, "process 0", Keys(FOLLOWS, LEADS))
    far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)  # most of it waits on the leader's side
    messages = [bytes(2**17)] * 24

    def lead():
        for message in messages:
            leader.send(Kind.COMMAND, message)
        leader.say_goodbye()
        leader.close(time.monotonic() + 5)

    thread = running(lead)
    time.sleep(0.2)
    follower._beat()
    found = [follower.receive()[1] for _ in range(4)]
    for _ in messages[4:]:
        time.sleep(0.01)
        follower._beat()
        found.append(follower.receive()[1])
    assert found == messages
    with pytest.raises(PeerLost, match="process 0 has closed the channel"):
        follower.receive()
    follower.close()
    thread.join()


@pytest.mark.parametrize("waits", [False, True])
def test_a_goodbye_with_a_failure_is_a_loss(ends, waits):
    leader, follower = ends
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    follower.watch(lost.put)
    if waits:
        waiting(follower)
    leader.say_goodbye("out of memory")
    assert lost.get(timeout=2) == "process 0 has failed: out of memory"
    with pytest.raises(PeerLost, match="process 0 has failed: out of memory"):
        follower.receive()


@pytest.mark.parametrize("waits", [False, True])
def test_a_goodbye_is_told_to_who_is_busy_too(ends, waits):
    leader, follower = ends
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    follower.watch(told.put, lambda: told.put("goodbye"))
    if waits:
        waiting(follower)
    leader.say_goodbye()
    assert told.get(timeout=2) == "goodbye"
    time.sleep(0.1)
    assert told.empty()


def test_who_says_goodbye_is_not_told_of_it(ends):
    leader, follower = ends
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    follower.watch(told.put, lambda: told.put("goodbye"))
    follower.say_goodbye()
    follower.close()
    leader.close()
    assert told.empty()


def test_closing_wakes_who_waits(ends):
    _, follower = ends
    found = waiting(follower)
    time.sleep(0.1)
    follower.close()
    assert found.get(timeout=2) == "the channel was closed"
