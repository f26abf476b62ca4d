"""One authenticated connection between the process that leads and one that follows, as either end sees it.

Frames go both ways: commands and what precedes them, and heartbeats. Each has a MAC over itself and its number, under a
key of this connection and direction, so that nobody on the network can add, change, repeat or reorder any.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

BEAT_S = 1.0
"""Between two heartbeats."""
SILENCE_S = 8.0
"""An end that has sent nothing for so long is lost: with the beat before it, noticed within 10 s."""
LINGER_S = 1.0
"""For the other end to take in what was sent last."""
MAX_FRAME_BYTES = 2**30

_HEAD = struct.Struct("!IB")
"""Length of what the frame carries, and its kind."""
_ORDER = struct.Struct("!Q")
_MAC_BYTES = 16
FRAME_BYTES = _HEAD.size + _MAC_BYTES
"""Of a frame besides what it carries."""
_READ_BYTES = 2**16, 2**20
"""Asked of the system at once: usually, and at most while a long frame comes."""
_HANG_UP = select.POLLRDHUP if hasattr(select, "POLLRDHUP") else 0
"""Elsewhere than on Linux the end of the other process is noticed with the next heartbeat."""
_SILENT = "its machine or the network between is down, or it hangs"
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class ChannelError(RuntimeError):
    """What is wrong between the processes, in words that say what to do."""


class PeerLost(ChannelError):
    """The other end is gone, silent, or has said goodbye."""


class Kind(IntEnum):
    """What a frame is."""

    BEAT = 0
    FACTS = 1
    """A follower's facts and announcements, its first frame."""
    WELCOME = 2
    REFUSAL = 3
    """Carries the reason."""
    COMMAND = 4
    GOODBYE = 5
    """The last frame. Carries what has failed, if something has."""


@dataclass(frozen=True)
class Keys:
    """Of the MACs of one connection, one for each direction."""

    send: bytes
    receive: bytes


class Link:
    """``send`` is for one thread and ``receive`` for one, which may be another; ``watch`` starts the link's own."""

    def __init__(self, connection: socket.socket, peer: str, keys: Keys) -> None:
        """``peer`` is what messages call the other end. The connection is the link's from here on."""
        connection.setblocking(False)
        self.peer = peer
        self.announcement = ""
        """Goes with each heartbeat."""
        self.announced = ""
        """What came with the other end's last one."""
        self._socket, self._keys = connection, keys
        self._sent = self._received = 0  # frames
        self._bytes, self._missing = bytearray(), 0  # of the next frame: those that are here, and how many are not
        self._frames: deque[tuple[Kind, bytes]] = deque()
        self._heard = time.monotonic()
        self._over: str | None = None  # why, once nothing more will come
        self._orderly = False  # by the other end's goodbye
        self._closing = False
        self._sending, self._reading = threading.Lock(), threading.Lock()
        self._tls = threading.Lock()  # OpenSSL's connections are for one thread at a time
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)
        self._thread: threading.Thread | None = None

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Raises PeerLost if the other end takes nothing of it for the silence limit, ValueError if it is too long."""
        if len(payload) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {len(payload):,} bytes: at most {MAX_FRAME_BYTES:,}")
        with self._sending:
            self._send(kind, payload, SILENCE_S)

    def receive(self, patience_s: float | None = None) -> tuple[Kind, bytes]:
        """The next frame that is no heartbeat, also one that came before the end.

        Raises PeerLost where none will come any more, or nothing at all did for ``patience_s``, by default the silence
        limit; that ends the link.
        """
        with self._reading:
            while not self._frames:
                if self._over is not None:
                    raise PeerLost(self._over)
                patience = SILENCE_S if patience_s is None else patience_s
                if not self._read(self._heard + patience):
                    self._end(f"{self.peer} has been silent for {patience:g} s: {_SILENT}")
            return self._frames.popleft()

    def check(self) -> None:
        """Take in what is there, without waiting. Raises PeerLost where nothing more will come."""
        with self._reading:
            self._take_in()

    def watch(self, on_lost: Callable[[str], None], on_goodbye: Callable[[], None] = lambda: None) -> None:
        """Send heartbeats and expect them from now on; a thread calls ``on_lost`` once if the other end is lost.

        The thread takes in what comes while nobody is in ``receive``. A goodbye without a failure is no loss: then it
        calls ``on_goodbye``.
        """
        self._heard = time.monotonic()
        callbacks = on_lost, on_goodbye
        self._thread = threading.Thread(target=self._watch, args=callbacks, name="command-link", daemon=True)
        self._thread.start()

    def say_goodbye(self, failure: str = "") -> None:
        """The last word, whatever becomes of it. What comes can still be received."""
        self._closing = True
        with contextlib.suppress(PeerLost), self._sending:
            self._send(Kind.GOODBYE, failure.encode(), LINGER_S)
        self._shut(socket.SHUT_WR)

    def close(self, linger_until: float = 0.0) -> None:
        """Close the connection, but wait until then for the other end to close its own, so that nothing is cut off.

        Whoever is in ``receive`` gets PeerLost.
        """
        self._closing = True
        if self._reading.acquire(timeout=max(0.0, linger_until - time.monotonic())):  # else another is in ``receive``
            try:
                while self._over is None and self._read(linger_until):
                    pass
            finally:
                self._reading.release()
        self._end("the channel was closed")
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._reading, self._sending:
            self._socket.close()

    def _watch(self, on_lost: Callable[[str], None], on_goodbye: Callable[[], None]) -> None:
        hang_up = select.poll()  # for no more than that: it would wake for every frame that ``receive`` waits for
        hang_up.register(self._socket, _HANG_UP)
        beat = time.monotonic()
        with contextlib.suppress(PeerLost):
            while self._over is None:
                wait_s = max(0.01, min(beat, self._heard + SILENCE_S) - time.monotonic())
                hung_up = bool(hang_up.poll(wait_s * 1000))
                if self._reading.acquire(blocking=hung_up):
                    try:
                        self._take_in()
                    finally:
                        self._reading.release()
                    if time.monotonic() > self._heard + SILENCE_S:
                        self._end(f"{self.peer} has been silent for {SILENCE_S:g} s: {_SILENT}")
                if time.monotonic() >= beat and not self._closing:
                    beat = time.monotonic() + BEAT_S
                    self._beat()
        if self._over is not None and not self._closing:
            if self._orderly:
                on_goodbye()
            else:
                on_lost(self._over)

    def _beat(self) -> None:
        if self._sending.acquire(blocking=False):  # else something is being sent, which says as much
            try:
                self._send(Kind.BEAT, self.announcement.encode(), self._heard + SILENCE_S - time.monotonic())
            finally:
                self._sending.release()

    def _send(self, kind: Kind, payload: bytes, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        head = _HEAD.pack(len(payload), kind)
        unsent = memoryview(b"".join([head, self._mac(self._keys.send, self._sent, head + payload), payload]))
        while unsent:
            if self._over is not None:
                raise PeerLost(self._over)
            try:
                with self._tls:
                    unsent = unsent[self._socket.send(unsent) :]
                deadline = time.monotonic() + patience_s
            except _NOT_NOW:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    self._end(f"{self.peer} has taken nothing for {SILENCE_S:g} s: {_SILENT}")
                self._writable.poll(max(0.0, left_s * 1000))
            except OSError as error:
                self._end(f"{self.peer} is gone: {error}")
        self._sent += 1

    def _take_in(self) -> None:
        while self._over is None and self._read(0.0):
            pass
        if self._over is not None:
            raise PeerLost(self._over)

    def _read(self, until: float) -> bool:
        """Take in what comes next, if anything does until then, be it the end."""
        try:
            came = self._next_bytes(until)
        except OSError as error:
            self._end(f"{self.peer} is gone: {error}")
            return True
        if came is None:
            return False
        if came:
            self._heard = time.monotonic()
            self._bytes += came
            self._open_frames()
        else:
            self._end(f"{self.peer} is gone: its process has ended")
        return True

    def _next_bytes(self, until: float) -> bytes | None:
        """b"" at the end of the connection, None if nothing came."""
        size = min(max(_READ_BYTES[0], self._missing), _READ_BYTES[1])
        while True:
            try:
                with self._tls:
                    return self._socket.recv(size)
            except _NOT_NOW:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    return None
                self._readable.poll(left_s * 1000)

    def _open_frames(self) -> None:
        while self._over is None and len(self._bytes) >= FRAME_BYTES:
            length, kind = _HEAD.unpack_from(self._bytes)
            self._missing = FRAME_BYTES + length - len(self._bytes)
            if length > MAX_FRAME_BYTES:
                self._end(f"{self.peer} began a frame of {length:,} bytes: at most {MAX_FRAME_BYTES:,}")
                return
            if self._missing > 0:
                return
            with memoryview(self._bytes) as view:
                head, mac = bytes(view[: _HEAD.size]), bytes(view[_HEAD.size : FRAME_BYTES])
                payload = bytes(view[FRAME_BYTES : FRAME_BYTES + length])
            del self._bytes[: FRAME_BYTES + length]
            if not hmac.compare_digest(mac, self._mac(self._keys.receive, self._received, head + payload)):
                self._end(f"what came from {self.peer} was changed on its way")
                return
            self._received += 1
            self._take(Kind(kind), payload)

    def _take(self, kind: Kind, payload: bytes) -> None:
        if kind is Kind.BEAT:
            self.announced = payload.decode()
        elif kind is not Kind.GOODBYE:
            self._frames.append((kind, payload))
        elif payload:
            self._end(f"{self.peer} has failed: {payload.decode()}")
        else:
            self._orderly, self._over = True, f"{self.peer} has closed the channel"

    def _end(self, why: str) -> None:
        if self._over is None:
            self._over = why
        self._shut(socket.SHUT_RDWR)  # wakes whoever waits for it

    def _shut(self, direction: int) -> None:
        with contextlib.suppress(OSError):  # it is shut already
            socket.socket.shutdown(self._socket, direction)  # TLS's own would also forget how to read

    @staticmethod
    def _mac(key: bytes, order: int, frame: bytes) -> bytes:
        return hmac.digest(key, _ORDER.pack(order) + frame, "sha256")[:_MAC_BYTES]
