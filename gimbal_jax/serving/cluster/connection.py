"""One connection between the leader and a follower: messages with their length in front, heartbeats, and loss.

Bytes from the network are never unpickled or evaluated. The length of a message is checked before it is read.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from enum import IntEnum

BEAT_S = 1.0
"""Seconds between two heartbeats."""
SILENCE_S = 8.0
"""Seconds without a byte after which the other process counts as lost."""
LINGER_S = 1.0
"""Seconds that ``close`` waits for the other process to read what was sent last."""
MAX_COMMAND_BYTES = 2**30
MAX_FOLLOWER_BYTES = 2**16
"""Limit of messages from a follower, and of a connection that has not shown the secret yet."""
MAX_REASON_LENGTH = 16_000
"""Most characters of a reason that ``close`` sends."""
HEAD = struct.Struct("!IB")
"""Start of a message: the number of bytes after it, and its kind."""


class ChannelError(RuntimeError):
    """A problem between the processes, with a message for the user."""


class PeerLost(ChannelError):
    """The other process has ended, is silent, or has closed the channel."""


class Kind(IntEnum):
    """Kind of a message."""

    JOIN = 0
    """First message of a follower."""
    ACCEPTED = 1
    BEAT = 2
    """Carries the last ``report`` of its sender."""
    COMMAND = 3
    GOODBYE = 4
    """Last message. Carries the reason of a failure or rejection; empty at an orderly end."""


class Connection:
    """One end of a connection. One thread at a time may send, another one may receive.

    ``watch`` starts two threads: one sends heartbeats, the other receives until the connection ends.
    """

    peer: str
    """The other process in messages for the user."""
    report: str
    """Text that goes with each heartbeat."""
    peer_report: str
    """Text of the last heartbeat from the other process."""

    def __init__(self, connected: socket.socket, peer: str, max_bytes: int) -> None:
        """Take over a connected socket. ``max_bytes`` is the limit of messages from the other process."""
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setblocking(False)
        self.peer = peer
        self.report = ""
        self.peer_report = ""
        self._commands: queue.SimpleQueue[bytes | PeerLost] = queue.SimpleQueue()  # the last one is the end
        self._socket = connected
        self._max_bytes = max_bytes
        self._sending = threading.Lock()
        self._tls = threading.Lock()  # OpenSSL wants one thread at a time in a connection
        self._closed = threading.Event()
        self._reader: threading.Thread | None = None

    def send(self, kind: Kind, payload: bytes = b"", deadline: float | None = None) -> None:
        """Send a message. Raise PeerLost if the other process takes nothing of it until ``deadline``, by default for
        ``SILENCE_S``; ValueError if the message is too long for any receiver."""
        if len(payload) > MAX_COMMAND_BYTES:
            raise ValueError(f"a message of {len(payload):,} bytes: must have at most {MAX_COMMAND_BYTES:,}")
        with self._sending:
            unsent = memoryview(HEAD.pack(len(payload), kind) + payload)
            while unsent:
                sent: int = self._transfer(self._socket.send, unsent, select.POLLOUT, deadline)
                unsent = unsent[sent:]

    def receive(self, deadline: float | None = None) -> tuple[Kind, bytes]:
        """Return the next message. Raise PeerLost if there is none until ``deadline``, by default if no byte comes for
        ``SILENCE_S``; also at the end of the connection, and at a message that is too long or of no known kind."""
        size, kind = HEAD.unpack(self._read(HEAD.size, deadline))
        if size > self._max_bytes:
            raise PeerLost(f"{self.peer} began a message of {size:,} bytes: must have at most {self._max_bytes:,}")
        if kind not in list(Kind):
            raise PeerLost(f"{self.peer} sent a message of unknown kind {kind}")
        return Kind(kind), self._read(size, deadline)

    def next_command(self) -> bytes:
        """Wait for the next command, after ``watch``. Raise PeerLost when the connection has ended."""
        command = self._commands.get()
        if isinstance(command, PeerLost):
            self._commands.put(command)
            raise command
        return command

    def watch(self, on_end: Callable[[str | None], None]) -> None:
        """Exchange heartbeats from now on, and receive commands.

        A thread calls ``on_end`` once at the end of the connection, unless this process closed it. It gets the reason
        if the other process is lost or has failed, and None after an orderly goodbye.
        """
        self._reader = threading.Thread(target=self._receive_all, args=(on_end,), name="commands", daemon=True)
        self._reader.start()
        threading.Thread(target=self._send_beats, name="heartbeats", daemon=True).start()

    def close(self, failure: str = "") -> None:
        """Say goodbye and close. The other process takes a ``failure`` for a loss, and reports it to its user."""
        self._closed.set()
        with contextlib.suppress(PeerLost):
            self.send(Kind.GOODBYE, failure[:MAX_REASON_LENGTH].encode(), time.monotonic() + LINGER_S)
        # Unread heartbeats at the close would make the system drop what the other process has not received yet.
        self._shut_down(socket.SHUT_WR)
        if self._reader is not None:
            self._reader.join(LINGER_S)
            self._shut_down(socket.SHUT_RDWR)
            self._reader.join()
        with self._sending:
            self._socket.close()

    def _receive_all(self, on_end: Callable[[str | None], None]) -> None:
        reason: str | None = None
        try:
            while True:
                kind, payload = self.receive()
                if kind is Kind.COMMAND:
                    self._commands.put(payload)
                elif kind is Kind.BEAT:
                    self.peer_report = payload.decode(errors="replace")
                elif kind is Kind.GOODBYE:
                    reason = f"{self.peer} has failed: {payload.decode(errors='replace')}" if payload else None
                    break
        except PeerLost as error:
            reason = str(error)
        self._commands.put(PeerLost(reason or f"{self.peer} has closed the channel"))
        if not self._closed.is_set():
            self._shut_down(socket.SHUT_RDWR)  # a ``send`` that waits fails now
            on_end(reason)

    def _send_beats(self) -> None:
        with contextlib.suppress(PeerLost):  # the receiving thread reports it
            while not self._closed.wait(BEAT_S):
                self.send(Kind.BEAT, self.report.encode())

    def _read(self, size: int, deadline: float | None) -> bytes:
        data = bytearray()
        while len(data) < size:
            came: bytes = self._transfer(self._socket.recv, min(size - len(data), 2**20), select.POLLIN, deadline)
            if not came:
                raise PeerLost(f"{self.peer} is gone: its process has ended")
            data += came
        return bytes(data)

    def _transfer[A, R](self, call: Callable[[A], R], argument: A, event: int, deadline: float | None) -> R:
        """Call a function of the socket, as soon as it need not wait. Raise PeerLost at the deadline or an error."""
        began = time.monotonic()
        until = began + SILENCE_S if deadline is None else deadline
        poll = select.poll()
        try:
            poll.register(self._socket, event)
            while True:
                with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError), self._tls:
                    return call(argument)
                left_s = until - time.monotonic()
                if left_s <= 0:
                    break
                poll.poll(left_s * 1000)
        except (OSError, ValueError) as error:  # ValueError: the socket is closed
            raise PeerLost(f"{self.peer} is gone: {error}") from error
        silent_s = time.monotonic() - began
        raise PeerLost(f"{self.peer} has been silent for {silent_s:.0f} s: its host or network is down, or it hangs")

    def _shut_down(self, direction: int) -> None:
        with contextlib.suppress(OSError):  # it is already
            socket.socket.shutdown(self._socket, direction)  # that of SSLSocket would also end its TLS
