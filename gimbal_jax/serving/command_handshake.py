"""How two processes find out that both know the same secret, and get keys for their connection from it.

The follower says who it is and a random number, the leader another one; then the follower proves by an HMAC over all of
that, and the leader by another one, that they know the secret. Both numbers are new for each connection and both sides
prove different things, so nothing that was heard before, or is thrown back, proves anything. Each direction of the
connection gets a key of its own for the MACs of its frames (see ``command_link``).

So without TLS somebody on the network can read commands, which hold the token ids of prompts, and can cut connections,
but cannot send commands, or change, repeat or reorder them. Who listens, or takes the leader's address, can try guesses
of the secret at leisure: take a random one. With TLS nobody can read, and followers speak to one certificate alone.
"""

from __future__ import annotations

import hmac
import os
import socket
import ssl
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path

from gimbal_jax.serving.command_link import ChannelError, Keys
from gimbal_jax.serving.network.api_keys import read_text
from gimbal_jax.serving.network.tls import pinned_context, server_context

MIN_SECRET_LENGTH = 16

_LEADER, _FOLLOWER = b"gimbal_jax leads 1\n", b"gimbal_jax follows 1\n"
"""First words of each side. A later form of the handshake gets another number."""
_INDEX = struct.Struct("!I")
_NONCE_BYTES = _MAC_BYTES = 32
_NO, _YES = b"\0", b"\1"


def read_secret(path: Path, warn: Callable[[str], None]) -> bytes:
    """The secret of a file, without the white space around it.

    ``warn`` gets what an operator should know. Raises ValueError that names the field, and never the secret.
    """
    secret = read_text("secret_file", path).strip()
    if len(secret) < MIN_SECRET_LENGTH:
        raise ValueError(f"secret_file {path}: has {len(secret)} characters, must have at least {MIN_SECRET_LENGTH}")
    if path.stat().st_mode & stat.S_IROTH:
        warn(f"secret_file {path}: every user of this machine can read it (chmod 600)")
    return secret.encode()


def leader_tls(cert: Path, key: Path) -> ssl.SSLContext:
    """TLS of the process that leads; raises ValueError that names the field."""
    context = server_context("command_cert", cert, "command_key", key)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nobody comes back
    return context


def follower_tls(cert: Path) -> ssl.SSLContext:
    """TLS of one that follows, which accepts the first certificate of the file alone; raises ValueError likewise."""
    context = pinned_context("command_cert", cert)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def meet_follower(connection: socket.socket, secret: bytes, deadline: float) -> tuple[int, Keys]:
    """Which process calls, and the keys, once it has proved that it knows the secret.

    Raises ChannelError where it has not, OSError where the connection ends or the time is over.
    """
    greeting = _read(connection, len(_FOLLOWER) + _INDEX.size + _NONCE_BYTES, deadline)
    if not greeting.startswith(_FOLLOWER):
        raise ChannelError("it does not speak as processes of this version of gimbal_jax do")
    (process,) = _INDEX.unpack_from(greeting, len(_FOLLOWER))
    answer = _LEADER + os.urandom(_NONCE_BYTES)
    connection.sendall(answer)
    proof = _read(connection, _MAC_BYTES, deadline)
    said = greeting + answer
    if not hmac.compare_digest(proof, _mac(secret, b"follower knows", said)):
        connection.sendall(_NO + bytes(_MAC_BYTES))
        raise ChannelError(f"it says that it is process {process}, but has another secret")
    connection.sendall(_YES + _mac(secret, b"leader knows", said))
    return process, Keys(_mac(secret, b"leader sends", said), _mac(secret, b"follower sends", said))


def meet_leader(connection: socket.socket, process: int, secret: bytes, deadline: float) -> Keys:
    """The keys, once both have proved that they know the secret; raises as ``meet_follower`` does."""
    greeting = _FOLLOWER + _INDEX.pack(process) + os.urandom(_NONCE_BYTES)
    connection.sendall(greeting)
    answer = _read(connection, len(_LEADER) + _NONCE_BYTES, deadline)
    if not answer.startswith(_LEADER):
        raise ChannelError("what answers there does not speak as a process 0 of this version of gimbal_jax does")
    said = greeting + answer
    connection.sendall(_mac(secret, b"follower knows", said))
    verdict = _read(connection, len(_YES) + _MAC_BYTES, deadline)
    if verdict.startswith(_NO):
        raise ChannelError("the secret differs from that of process 0: give all processes the same secret_file")
    if not hmac.compare_digest(verdict, _YES + _mac(secret, b"leader knows", said)):
        raise ChannelError("what answers there does not know the secret, so it is not process 0")
    return Keys(_mac(secret, b"follower sends", said), _mac(secret, b"leader sends", said))


def _mac(secret: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, role + b"\0" + said, "sha256")


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Exactly so many bytes; raises ConnectionError, or TimeoutError."""
    data = b""
    while len(data) < size:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left_s)
        came = connection.recv(size - len(data))
        if not came:
            raise ConnectionError("it hung up")
        data += came
    return data
