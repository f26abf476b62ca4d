"""Where followers come in: each connection proves itself on a thread of its own, so that a slow one delays nobody."""

from __future__ import annotations

import contextlib
import json
import queue
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gimbal_jax.serving.command_handshake import meet_follower
from gimbal_jax.serving.command_link import ChannelError, Link

HANDSHAKE_S = 10.0
"""Time for a new connection to prove itself."""
MAX_HANDSHAKES = 64
"""At once; further connections wait."""


@dataclass(frozen=True)
class Guest:
    """A process that knows the secret."""

    process: int
    link: Link
    facts: Mapping[str, str]
    announcements: Mapping[str, str]


def listen(address: tuple[str, int]) -> socket.socket:
    """Raises OSError that names the address where it is taken, or not of this machine."""
    host, port = address
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        with contextlib.ExitStack() as unless_it_listens:
            unless_it_listens.enter_context(listener)
            # Connections of an earlier process that are still closing do not hold the port.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen()
            unless_it_listens.pop_all()
    except OSError as error:
        raise OSError(f"process 0 cannot listen for commands on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


class Door:
    """Takes connections of a listener, one thread for each until it has proved itself or failed to."""

    def __init__(self, listener: socket.socket, secret: bytes, tls: ssl.SSLContext | None) -> None:
        self._listener, self._secret, self._tls = listener, secret, tls
        self._ready = select.poll()
        self._ready.register(listener, select.POLLIN)
        self._arrivals: queue.SimpleQueue[Guest | str] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()

    def arrivals(self, wait_s: float) -> Iterator[Guest | str]:
        """Who has come, or what is to be said of a stranger; waits for a while for a new connection."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) >= MAX_HANDSHAKES:
            time.sleep(wait_s)
        elif self._ready.poll(wait_s * 1000):
            with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # it has left already
                connection, (host, *_) = self._listener.accept()
                thread = threading.Thread(target=self._let_in, args=(connection, host), daemon=True)
                self._threads.append(thread)
                thread.start()
        while not self._arrivals.empty():
            yield self._arrivals.get()

    def close(self) -> None:
        """Nobody else comes in."""
        self._closed.set()
        self._listener.close()
        while not self._arrivals.empty():
            if isinstance(arrival := self._arrivals.get(), Guest):
                arrival.link.close()

    def _let_in(self, connection: socket.socket, host: str) -> None:
        try:
            guest = self._meet(connection, host)
        except TimeoutError:
            self._arrivals.put(f"{host} did not say who it is within {HANDSHAKE_S:g} s")
        except (OSError, ValueError, ChannelError) as error:
            self._arrivals.put(f"{host} is no process of ours: {error}")
        else:
            if self._closed.is_set():
                guest.link.close()
            else:
                self._arrivals.put(guest)

    def _meet(self, connection: socket.socket, host: str) -> Guest:
        deadline = time.monotonic() + HANDSHAKE_S
        with contextlib.ExitStack() as unless_it_is_a_guest:
            unless_it_is_a_guest.enter_context(connection)
            connection.settimeout(HANDSHAKE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
                unless_it_is_a_guest.enter_context(connection)
            process, keys = meet_follower(connection, self._secret, deadline)
            link = Link(connection, f"process {process} ({host})", keys)
            facts, announcements = json.loads(link.receive(HANDSHAKE_S)[1])
            unless_it_is_a_guest.pop_all()
        return Guest(process, link, facts, announcements)
