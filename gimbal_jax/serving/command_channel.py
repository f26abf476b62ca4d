"""The channel by which the process that leads tells the others what to do: one connection for each of them.

Process 0 listens until all others are there, and makes sure that they know the secret and agree with it before anything
is computed. Then it sends commands, both ends send heartbeats, and nothing listens any more. What somebody on the
network could do: ``command_handshake``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from gimbal_jax.serving.agreement import differences
from gimbal_jax.serving.command_door import Door, Guest, listen
from gimbal_jax.serving.command_handshake import meet_leader
from gimbal_jax.serving.command_link import FRAME_BYTES, LINGER_S, ChannelError, Kind, Link, PeerLost

GRACE_S = 5.0
"""For the others to come where one differs already, so that all differences are said together."""
SAY_S = 10.0
"""Between two lines about who is waited for."""
RETRY_S = 0.5
"""Between two attempts of a follower to reach its leader."""
CONNECT_S = 5.0
"""For one of them."""
LOOK_S = 0.1


class LeaderChannel:
    """Process 0's end: ``gather``, then ``watch`` at once. ``send`` is for one thread."""

    def __init__(self, address: tuple[str, int], followers: int, secret: bytes, tls: ssl.SSLContext | None) -> None:
        """Listens at once for processes 1 to ``followers``. OSError names the address where that cannot be."""
        self._listener = listen(address)
        self._followers, self._secret, self._tls = followers, secret, tls
        self._links: list[Link] = []
        self._gathering, self._closed = False, threading.Event()
        self.bytes_sent = 0
        """By commands, with what each frame adds."""

    @property
    def port(self) -> int:
        """Where it listens until all are there."""
        return int(self._listener.getsockname()[1])

    @property
    def announced(self) -> list[str]:
        """What each follower announced last, process 1 first."""
        return [link.announced for link in self._links]

    def gather(self, facts: Mapping[str, str], timeout_s: float, say: Callable[[str], None]) -> list[Mapping[str, str]]:
        """Wait until all followers are connected and agree; returns what each announced, process 1 first.

        ``say`` gets a line now and then about who is missing, and one about each stranger: who does not speak the
        protocol, has another secret, or is no process that is waited for. They do not end the wait. Raises ChannelError
        that names every difference, or those who did not come; the followers who are there are told the same.
        """
        self._gathering = True
        deadline = time.monotonic() + timeout_s
        guests: dict[int, Guest] = {}
        differing: list[str] = []
        said: set[str] = set()
        next_line = time.monotonic() + SAY_S
        with contextlib.closing(Door(self._listener, self._secret, self._tls)) as door:
            while missing := sorted(set(range(1, self._followers + 1)) - set(guests)):
                if self._closed.is_set() or time.monotonic() > deadline:
                    break
                for arrival in door.arrivals(LOOK_S):
                    complaint = self._seat(arrival, guests) if isinstance(arrival, Guest) else arrival
                    if complaint is None and isinstance(arrival, Guest):
                        differing += differences(arrival.process, arrival.facts, facts)
                    elif complaint is not None and complaint not in said:
                        said.add(complaint)
                        say(complaint)
                for left in _who_left(guests):
                    say(f"{left}; waiting for it to come again")
                if differing:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                if time.monotonic() > next_line:
                    say(f"waiting for {_processes(missing)}")
                    next_line += SAY_S
        links = [guests[process].link for process in sorted(guests)]
        problem = ""
        if differing:
            problem = "\n  ".join(["the processes differ:", *differing])
        elif self._closed.is_set():
            problem = "process 0 stopped waiting"
        elif missing:
            problem = f"{_processes(missing)} did not come within {timeout_s:g} s"
        if problem:
            _send_away(links, problem)
            raise ChannelError(problem)
        self._links = links
        for link in links:
            link.send(Kind.WELCOME)
        return [guests[process].announcements for process in sorted(guests)]

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """From now on heartbeats go both ways.

        ``on_lost`` is called once for each follower that is gone or silent or says that it has failed, on a thread of
        the channel. One that says goodbye is not lost.
        """
        for link in self._links:
            link.watch(on_lost)

    def send(self, messages: Sequence[bytes]) -> None:
        """A command for each follower, process 1 first. PeerLost if one takes nothing for the silence limit."""
        for link, message in zip(self._links, messages, strict=True):
            link.send(Kind.COMMAND, message)
            self.bytes_sent += FRAME_BYTES + len(message)

    def close(self, failure: str = "") -> None:
        """Say goodbye; with a ``failure`` that is a loss to the followers, who are told why. Ends a ``gather``."""
        self._closed.set()
        if not self._gathering:
            self._listener.close()
        for link in self._links:
            link.say_goodbye(failure)
        linger_until = time.monotonic() + LINGER_S
        for link in self._links:
            link.close(linger_until)

    def _seat(self, guest: Guest, guests: dict[int, Guest]) -> str | None:
        """Take in a process that is waited for; otherwise tell it, and return, why not."""
        if guest.process in guests:
            problem = f"process {guest.process} is here already: {guests[guest.process].link.peer}"
        elif not 1 <= guest.process <= self._followers:
            problem = f"there is no process {guest.process} to wait for: there are {self._followers + 1}, from 0 on"
        else:
            guests[guest.process] = guest
            return None
        _send_away([guest.link], problem)
        return f"{guest.link.peer} is sent away: {problem}"


class FollowerChannel:
    """The end of any other process: ``connect``, then ``watch`` at once. ``receive`` is for one thread."""

    def __init__(self, link: Link) -> None:
        """Of a process that was let in: see ``connect``."""
        self._link = link

    @classmethod
    def connect(
        cls,
        address: tuple[str, int],
        process: int,
        secret: bytes,
        tls: ssl.SSLContext | None,
        facts: Mapping[str, str],
        announcements: Mapping[str, str],
        timeout_s: float,
    ) -> FollowerChannel:
        """Find the leader, which may start later, and wait until all processes are there and agree.

        Raises ChannelError, with the leader's words if it refuses.
        """
        deadline = time.monotonic() + timeout_s
        about = json.dumps([dict(facts), dict(announcements)]).encode()
        while True:
            try:
                link = _introduce(address, process, secret, tls, about, deadline)
                break
            except ssl.SSLCertVerificationError as error:
                words = f"process 0 shows another certificate than command_cert: {error.verify_message}"
                raise ChannelError(words) from error
            except (OSError, PeerLost) as error:  # not there yet, or gone to start anew
                if time.monotonic() + RETRY_S > deadline:
                    where = f"{address[0]}:{address[1]}"
                    hung_up = isinstance(error, ssl.SSLError | ConnectionError) and error.errno != errno.ECONNREFUSED
                    hint = "; do both use TLS, or neither?" if hung_up else ""
                    words = f"no process 0 let this one in at {where} within {timeout_s:g} s: {error}{hint}"
                    raise ChannelError(words) from error
            time.sleep(RETRY_S)
        return cls(link)

    def watch(self, on_lost: Callable[[str], None], on_goodbye: Callable[[], None] = lambda: None) -> None:
        """From now on heartbeats go both ways. ``on_lost`` is called once, on a thread of the channel, if the leader is
        gone, silent, or says that it has failed, ``on_goodbye`` if it closes the channel; whoever is in ``receive``
        gets PeerLost as well."""
        self._link.watch(on_lost, on_goodbye)

    def receive(self) -> bytes:
        """The next command. PeerLost where none will come any more: the leader is lost, or has closed the channel."""
        return self._link.receive()[1]

    def announce(self, text: str) -> None:
        """Tell the leader, with each heartbeat from now on."""
        self._link.announcement = text

    def close(self, failure: str = "") -> None:
        """Say goodbye; with a ``failure`` that is a loss to the leader, which is told why."""
        self._link.say_goodbye(failure)
        self._link.close()


def _introduce(
    address: tuple[str, int],
    process: int,
    secret: bytes,
    tls: ssl.SSLContext | None,
    about: bytes,
    deadline: float,
) -> Link:
    """Say who this is, and wait to be welcome. Raises OSError or PeerLost where another attempt may succeed."""
    with contextlib.ExitStack() as unless_welcome:
        connection = socket.create_connection(address, timeout=CONNECT_S)
        unless_welcome.enter_context(connection)
        if connection.getsockname() == connection.getpeername():  # TCP can meet itself where nobody listens
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
        connection.settimeout(max(0.1, deadline - time.monotonic()))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            connection = tls.wrap_socket(connection)
            unless_welcome.enter_context(connection)
        keys = meet_leader(connection, process, secret, deadline)
        link = Link(connection, "process 0", keys)
        link.send(Kind.FACTS, about)
        try:
            kind, words = link.receive(max(0.1, deadline - time.monotonic()))
        except PeerLost as error:
            if time.monotonic() < deadline:
                raise
            raise TimeoutError("it is there, but the others are not") from error
        if kind is Kind.REFUSAL:
            raise ChannelError(f"process 0 refuses this one: {words.decode()}")
        unless_welcome.pop_all()
    return link


def _who_left(guests: dict[int, Guest]) -> Iterable[str]:
    """Takes those who have left out of the guests."""
    for process, guest in list(guests.items()):
        try:
            guest.link.check()
        except PeerLost as error:
            del guests[process]
            guest.link.close()
            yield str(error)


def _send_away(links: Sequence[Link], problem: str) -> None:
    for link in links:
        with contextlib.suppress(PeerLost):
            link.send(Kind.REFUSAL, problem.encode())
        link.say_goodbye()
    linger_until = time.monotonic() + LINGER_S
    for link in links:
        link.close(linger_until)


def _processes(indices: Sequence[int]) -> str:
    return f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
