"""The command channel: process 0, the leader, sends commands to each follower in order, over one connection each.

A follower connects, sends its index, the secret and its facts (see ``agreement``), and waits until it is accepted. Then
both sides exchange heartbeats, and the leader no longer listens.

Security: with TLS 1.3 followers accept one certificate only, and the leader accepts processes that know the secret.
Over plain TCP anyone on the network can read and change commands, so it is for trusted networks. No protocol of our own
adds to that, because jax's coordinator and the collectives are open to anyone who can connect.

A gRPC stream would not be less code: it compares the certificate's name with the address, obeys proxy variables, and
sends from a thread of its own, which would have to wait for Python's lock while the engine thread continues.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import queue
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from gimbal_jax.serving.cluster.agreement import differences
from gimbal_jax.serving.cluster.connection import (
    MAX_COMMAND_BYTES,
    MAX_FOLLOWER_BYTES,
    ChannelError,
    Connection,
    Kind,
    PeerLost,
)
from gimbal_jax.serving.network.ports import address_of

JOIN_S = 10.0
"""Seconds that a new connection has for TLS and its first message."""
MAX_THREADS = 100
"""Threads of the process above which new connections wait."""
TOGETHER_S = 5.0
"""Seconds to wait for more followers after one differs, so that one error names all differences."""
LOG_S = 10.0
"""Seconds between two log lines about missing followers."""
LOOK_S = 0.1
"""Seconds that the leader waits for a new connection before it looks at what has joined."""
CONNECT_S = 5.0
"""Seconds for one attempt of a follower to reach the leader."""
RETRY_S = 0.5
"""Seconds between two attempts."""
_JOIN = struct.Struct("!I32s")
"""Start of the first message: process index and SHA-256 of the secret. JSON of host name and facts follows."""


@dataclass(frozen=True)
class Accepted:
    """A follower that knows the secret."""

    process: int
    host: str
    facts: Mapping[str, str]


@dataclass(frozen=True)
class Rejected:
    """A connection that was closed."""

    reason: str


class LeaderChannel:
    """Process 0's end: ``gather`` first, then ``watch``. One thread at a time may ``send``."""

    def __init__(self, address: tuple[str, int], followers: int, secret: bytes, tls: ssl.SSLContext | None) -> None:
        """Listen for processes 1 to ``followers``. Raise OSError that names the address if that is impossible."""
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            self._listener = socket.create_server(address, family=family)
        except OSError as error:
            problem = f"process 0 cannot listen for commands on {address_of(*address)}: {error.strerror}"
            raise OSError(problem) from error
        self._listener.settimeout(LOOK_S)
        self._followers = followers
        self._secret_hash = hashlib.sha256(secret).digest()
        self._tls = tls
        self._joined: dict[int, Connection] = {}

    @property
    def reports(self) -> list[str]:
        """The last report of each follower, process 1 first."""
        return [connection.peer_report for connection in self._connections]

    @property
    def _connections(self) -> list[Connection]:
        return [self._joined[process] for process in sorted(self._joined)]

    def gather(self, facts: Mapping[str, str], timeout_s: float, log: Callable[[str], None]) -> list[str]:
        """Wait until all followers have joined and agree. Return their host names, process 1 first.

        ``log`` gets a line now and then about missing followers, and one for each reason to reject a connection. A
        rejected connection does not end the wait. Raise ChannelError with all differences, or with the followers that
        did not join. The followers that did join get the same message.
        """
        deadline = time.monotonic() + timeout_s
        log_time = time.monotonic() + LOG_S
        arrivals: queue.SimpleQueue[Accepted | Rejected] = queue.SimpleQueue()
        hosts: dict[int, str] = {}
        differing: list[str] = []
        logged: set[str] = set()
        while (missing := set(range(1, self._followers + 1)) - hosts.keys()) and time.monotonic() < deadline:
            self._accept(arrivals)
            while not arrivals.empty():
                match arrivals.get():
                    case Accepted(process, host, its_facts):
                        hosts[process] = host
                        differing += differences(process, its_facts, facts)
                    case Rejected(reason) if reason not in logged:
                        logged.add(reason)
                        log(reason)
            if differing:
                deadline = min(deadline, time.monotonic() + TOGETHER_S)
            if time.monotonic() > log_time:
                log(f"waiting for {_processes(missing)}")
                log_time += LOG_S
        self._listener.close()
        # The followers learn the outcome.
        if missing or differing:
            missed = f"{_processes(missing)} did not join within {timeout_s:g} s"
            problem = "\n  ".join(["the processes differ:", *differing]) if differing else missed
            self.close(problem)
            raise ChannelError(problem)
        for connection in self._connections:
            connection.send(Kind.ACCEPTED)
        return [hosts[process] for process in sorted(hosts)]

    def watch(self, on_end: Callable[[str | None], None]) -> None:
        """Exchange heartbeats from now on. See ``Connection.watch``: ``on_end`` is called once for each follower."""
        for connection in self._connections:
            connection.watch(on_end)

    def send(self, commands: Sequence[bytes]) -> None:
        """Send a command to each follower, process 1 first. Raise PeerLost that names a lost follower."""
        for connection, command in zip(self._connections, commands, strict=True):
            connection.send(Kind.COMMAND, command)

    def close(self, failure: str = "") -> None:
        """Close all connections. Followers report a ``failure``."""
        self._listener.close()
        for connection in self._connections:
            connection.close(failure)

    def _accept(self, arrivals: queue.SimpleQueue[Accepted | Rejected]) -> None:
        """Wait ``LOOK_S`` for a new connection. A thread reads its first message, so that it delays no other one."""
        if threading.active_count() > MAX_THREADS:
            time.sleep(LOOK_S)
            return
        with contextlib.suppress(TimeoutError, ConnectionAbortedError):
            connected, (host, *_) = self._listener.accept()
            threading.Thread(target=lambda: arrivals.put(self._admit(connected, host)), daemon=True).start()

    def _admit(self, connected: socket.socket, host: str) -> Accepted | Rejected:
        try:
            with contextlib.ExitStack() as if_rejected:
                if_rejected.enter_context(connected)
                deadline = time.monotonic() + JOIN_S
                connected.settimeout(JOIN_S)
                if self._tls is not None:
                    connected = if_rejected.enter_context(self._tls.wrap_socket(connected, server_side=True))
                connection = Connection(connected, f"a process on {host}", MAX_FOLLOWER_BYTES)
                arrival = self._answer(connection, host, connection.receive(deadline)[1])
                if isinstance(arrival, Accepted):
                    if_rejected.pop_all()
                return arrival
        except (OSError, ValueError, KeyError, TypeError, struct.error, PeerLost) as error:
            hint = "another program or version, or one side without TLS"
            return Rejected(f"a connection was rejected: {error} ({hint})")

    def _answer(self, connection: Connection, host: str, message: bytes) -> Accepted | Rejected:
        """Check the first message of a follower. Its secret is compared before any of the rest is parsed."""
        process, secret_hash = _JOIN.unpack_from(message)
        problem = ""
        if not hmac.compare_digest(secret_hash, self._secret_hash):
            problem = "the secret differs: give all processes the same secret_file"
        else:
            about = json.loads(message[_JOIN.size :])
            accepted = Accepted(process, about["host"], about["facts"])
            connection.peer = f"process {process} ({host})"
            in_range = 1 <= process <= self._followers
            if not in_range or self._joined.setdefault(process, connection) is not connection:
                problem = f"it has joined already, or is not one of {self._followers + 1} processes"
        if problem:
            connection.close(problem)
            return Rejected(f"process {process} ({host}) was rejected: {problem}")
        return accepted


def join_leader(
    address: tuple[str, int],
    process: int,
    secret: bytes,
    tls: ssl.SSLContext | None,
    facts: Mapping[str, str],
    timeout_s: float,
) -> Connection:
    """Connect to the leader, which may start later, and wait until all processes have joined and agree.

    Raise ChannelError, with the leader's reason if it rejects this process.
    """
    deadline = time.monotonic() + timeout_s
    about = json.dumps({"host": socket.gethostname(), "facts": dict(facts)}).encode()
    message = _JOIN.pack(process, hashlib.sha256(secret).digest()) + about
    while True:
        try:
            return _join(address, tls, message, deadline)
        except ssl.SSLCertVerificationError as error:
            problem = f"process 0 does not have the certificate of command_cert: {error.verify_message}"
            raise ChannelError(problem) from error
        except (OSError, PeerLost) as error:
            if time.monotonic() + RETRY_S > deadline:
                problem = f"process 0 did not accept this process at {address_of(*address)} within {timeout_s:g} s"
                raise ChannelError(f"{problem}: {error} (do both use TLS, or neither?)") from error
        time.sleep(RETRY_S)


def _join(address: tuple[str, int], tls: ssl.SSLContext | None, message: bytes, deadline: float) -> Connection:
    """Try to join once. Raise OSError or PeerLost if another attempt may succeed."""
    with contextlib.ExitStack() as unless_accepted:
        connected = unless_accepted.enter_context(socket.create_connection(address, CONNECT_S))
        if tls is not None:
            connected = unless_accepted.enter_context(tls.wrap_socket(connected))
        connection = Connection(connected, "process 0", MAX_COMMAND_BYTES)
        connection.send(Kind.JOIN, message)
        kind, payload = connection.receive(deadline)
        if kind is Kind.GOODBYE:
            raise ChannelError(f"process 0 rejects this process: {payload.decode(errors='replace')}")
        if kind is not Kind.ACCEPTED:  # for one, TCP can connect to itself if nothing listens
            raise PeerLost("another program answers there")
        unless_accepted.pop_all()
    return connection


def _processes(indices: Collection[int]) -> str:
    return f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, sorted(indices)))}"
