"""Who is believed to know the secret, and what is said of a secret's file."""

import socket
import threading
import time

import pytest

from gimbal_jax.serving.command_handshake import meet_follower, meet_leader, read_secret
from gimbal_jax.serving.command_link import ChannelError

SECRET, OTHER = b"right-secret-0123456789", b"wrong-secret-0123456789"
WAIT_S = 5.0


class Wire:
    """One end of a connection that keeps what came."""

    def __init__(self, end: socket.socket):
        self.end, self.heard = end, b""

    def recv(self, size):
        came = self.end.recv(size)
        self.heard += came
        return came

    def __getattr__(self, name):
        return getattr(self.end, name)


@pytest.fixture
def ends():
    """Of the leader, and of the follower."""
    near, far = socket.socketpair()
    with near, far:
        far.settimeout(WAIT_S)
        yield near, far


def outcome(meet, *arguments):
    try:
        return meet(*arguments, time.monotonic() + WAIT_S)
    except (ChannelError, OSError) as error:
        return str(error)


def both(ends, leader_secret, follower_secret, process=3):
    """What the handshake gives to the leader, and to the follower."""
    near, far = ends
    found = []
    thread = threading.Thread(target=lambda: found.append(outcome(meet_follower, near, leader_secret)))
    thread.start()
    follower = outcome(meet_leader, far, process, follower_secret)
    thread.join()
    return found[0], follower


def test_who_knows_the_secret_is_known_by_its_index_and_gets_keys_of_this_connection_alone(ends):
    (process, leader), follower = both(ends, SECRET, SECRET)
    assert process == 3
    assert (leader.send, leader.receive) == (follower.receive, follower.send)
    assert leader.send != leader.receive
    (_, again), _ = both(ends, SECRET, SECRET)
    assert not {leader.send, leader.receive} & {again.send, again.receive}


def test_another_secret_is_told_to_both(ends):
    leader, follower = both(ends, SECRET, OTHER)
    assert leader == "it says that it is process 3, but has another secret"
    assert follower == "the secret differs from that of process 0: give all processes the same secret_file"


def test_nothing_that_was_heard_is_of_use_to_a_follower(ends):
    near, far = ends
    wire = Wire(near)
    both((wire, far), SECRET, SECRET)
    near, far = socket.socketpair()
    with near, far:
        far.sendall(wire.heard)
        assert outcome(meet_follower, near, SECRET) == "it says that it is process 3, but has another secret"


def as_leader(far, play):
    """What a follower says when ``play`` takes the leader's part at the other end."""
    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    found = outcome(meet_leader, far, 3, SECRET)
    thread.join()
    return found


def test_a_leader_that_does_not_know_the_secret_is_refused(ends):
    near, far = ends

    def guess():
        near.recv(1000)
        near.sendall(b"gimbal_jax leads 1\n" + bytes(32))
        near.recv(1000)
        near.sendall(b"\1" + bytes(32))

    assert as_leader(far, guess) == "what answers there does not know the secret, so it is not process 0"


def test_a_follower_s_own_proof_proves_nothing_to_it(ends):
    near, far = ends

    def throw_back():
        greeting = near.recv(1000)
        near.sendall(b"gimbal_jax leads 1\n" + greeting[-32:])
        near.sendall(b"\1" + near.recv(1000))

    assert as_leader(far, throw_back) == "what answers there does not know the secret, so it is not process 0"


def test_what_a_leader_said_before_proves_nothing(ends):
    near, far = ends
    wire = Wire(far)
    both((near, wire), SECRET, SECRET)
    said = wire.heard

    def repeat():
        near.recv(1000)
        near.sendall(said)

    assert as_leader(far, repeat) == "what answers there does not know the secret, so it is not process 0"


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a" * 100, bytes(2**16)])
def test_garbage_is_refused_before_more_of_it_is_read(ends, garbage):
    near, far = ends
    wire = Wire(near)
    far.sendall(garbage)
    complaint = "it does not speak as processes of this version of gimbal_jax do"
    assert outcome(meet_follower, wire, SECRET) == complaint
    assert len(wire.heard) < 100


def test_garbage_of_a_leader_is_refused(ends):
    near, far = ends
    found = as_leader(far, lambda: near.sendall(b"HTTP/1.1 400 Bad Request\r\n" + bytes(100)))
    assert found == "what answers there does not speak as a process 0 of this version of gimbal_jax does"


def test_the_deadline_holds_for_all_of_it_however_slowly_it_comes(ends):
    near, far = ends
    began = time.monotonic()

    def drip():
        for byte in b"gimbal":
            far.sendall(bytes([byte]))
            time.sleep(0.1)

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(TimeoutError):
        meet_follower(near, SECRET, began + 0.3)
    assert time.monotonic() - began < 0.6
    thread.join()


def test_who_hangs_up_is_noticed(ends):
    near, far = ends
    far.sendall(b"gimbal")
    far.shutdown(socket.SHUT_WR)
    assert outcome(meet_follower, near, SECRET) == "it hung up"


@pytest.mark.parametrize("mode, warnings", [(0o600, 0), (0o640, 0), (0o644, 1)])
def test_a_secret_that_all_can_read_is_read_with_a_warning(tmp_path, mode, warnings):
    path = tmp_path / "secret"
    path.write_text("\n 0123456789abcdef \n")
    path.chmod(mode)
    said: list[str] = []
    assert read_secret(path, said.append) == b"0123456789abcdef"
    assert said == [f"secret_file {path}: every user of this machine can read it (chmod 600)"] * warnings


@pytest.mark.parametrize(
    "content, complaint",
    [
        (None, "No such file"),
        (b"0123456789abcde\n", "has 15 characters, must have at least 16"),
        (b"\xff" * 20, "must be plain ASCII"),
    ],
)
def test_a_secret_that_cannot_be_is_refused_by_field(tmp_path, content, complaint):
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"secret_file .*secret: {complaint}") as error:
        read_secret(path, pytest.fail)
    assert "0123" not in str(error.value)
