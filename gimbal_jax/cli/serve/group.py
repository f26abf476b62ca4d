"""``gimbal serve`` in several processes: the one that leads gathers the others, and these follow it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

import typer

from gimbal_jax.cli.serve.options import ServeOptions
from gimbal_jax.cli.serve.processes import Processes
from gimbal_jax.cli.serve.setup import Checkpoint, check_servable, gather_pages, load_runner, warm_up, with_kv_pool
from gimbal_jax.cli.terminal import console
from gimbal_jax.config import ServerConfig
from gimbal_jax.serving.command_link import ChannelError, PeerLost

if TYPE_CHECKING:
    import jax

    from gimbal_jax.serving.command_channel import LeaderChannel
    from gimbal_jax.serving.runtime.commands import Command, Layout

GATHER_S = 600.0
"""For all processes to come and agree: some read a checkpoint's fingerprint from slow disks."""
END_S = 5.0
"""For streams and messages to end after a process was lost; threads that hang are not waited for."""
EXPLAIN_S = 1.0
"""A collective fails a moment before the channel says who is gone."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
HOST = "host"


class Group:
    """The followers, as the leader has them (see ``commands.Followers``)."""

    def __init__(self, channel: LeaderChannel, hosts: list[str]) -> None:
        self.hosts = hosts
        """Of each process, the leader's first."""
        self._channel = channel
        self._tell: Callable[[str], None] | None = None
        self._lock = threading.Lock()
        self._is_lost, self._reason = threading.Event(), ""
        self._commands, self._seconds = 0, 0.0

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """From now on ``tell`` hears of a follower that is lost, and the process ends in ``END_S`` at the latest;
        before, it ends at once."""
        with self._lock:
            self._tell = tell

    def lost(self, reason: str) -> None:
        """A follower is gone: nobody can compute any more."""
        with self._lock:
            if self._tell is None:
                console.print(reason)
                end_process(1)
            self._reason = self._reason or reason
            self._is_lost.set()
            self._tell(reason)
            timer = threading.Timer(END_S, end_process, [1])
            timer.daemon = True
            timer.start()

    def send(self, command: Command, layout: Layout) -> None:
        from gimbal_jax.serving.runtime.commands import encode

        began = time.perf_counter()
        self._channel.send([encode(command, layout, process) for process in range(1, len(self.hosts))])
        self._commands += 1
        self._seconds += time.perf_counter() - began

    def compiles_after_warmup(self) -> int:
        return sum(int(said or 0) for said in self._channel.announced)

    def explain(self, error: Exception) -> Exception:
        return PeerLost(self._reason) if self._is_lost.wait(EXPLAIN_S) else error

    def leave(self) -> NoReturn:
        """End before anything was served: the followers may wait in a computation that will not come."""
        self._channel.close()
        end_process(0)

    def cost(self) -> str:
        """What commands took so far, in words."""
        commands, followers = max(self._commands, 1), max(len(self.hosts) - 1, 1)
        size, took = self._channel.bytes_sent / commands / followers, self._seconds / commands
        return f"{self._commands:,} commands to each of {followers} processes: {size:,.0f} bytes, {took * 1e6:.0f} us"


@contextlib.contextmanager
def gather(
    processes: Processes, checkpoint: Checkpoint, config: ServerConfig, options: ServeOptions
) -> Iterator[Group]:
    """Wait for the followers, who must agree on everything. Raises ValueError with what they differ in.

    Whatever ends the block, the followers are told; where it raised, they take it for the leader's failure.
    """
    from gimbal_jax.serving.command_channel import LeaderChannel
    from gimbal_jax.serving.command_handshake import leader_tls

    tls = None
    if options.command_cert is not None:
        if options.command_key is None:
            raise ValueError("--command-cert needs --command-key in process 0")
        tls = leader_tls(options.command_cert, options.command_key)
    address = processes.coordinator[0], processes.command_port
    channel = LeaderChannel(address, processes.count - 1, _secret(options), tls)
    try:
        with _refusals():
            found = channel.gather(_facts(checkpoint, config, options), GATHER_S, console.print)
        group = Group(channel, [socket.gethostname(), *(about[HOST] for about in found)])
        channel.watch(group.lost)
        _check_save(options)
        console.print(f"{processes.count} processes agree, on {', '.join(dict.fromkeys(group.hosts))}")
        yield group
    except BaseException as error:
        channel.close(_words(error))
        raise
    console.print(group.cost())
    channel.close()


def follow(
    processes: Processes, checkpoint: Checkpoint, config: ServerConfig, options: ServeOptions, devices: list[jax.Device]
) -> int:
    """Do what the leader says until it says that all is over; returns the exit code."""
    from gimbal_jax.model.orbax_checkpoint import save_orbax
    from gimbal_jax.serving.command_channel import FollowerChannel
    from gimbal_jax.serving.command_handshake import follower_tls
    from gimbal_jax.serving.runtime.commands import Stop, decode

    check_servable(checkpoint, config, options, devices)
    config = with_kv_pool(checkpoint.config, config, options)
    facts, about = _facts(checkpoint, config, options), {HOST: socket.gethostname()}
    tls = follower_tls(options.command_cert) if options.command_cert is not None else None
    address = processes.coordinator[0], processes.command_port
    with _refusals():
        channel = FollowerChannel.connect(address, processes.index, _secret(options), tls, facts, about, GATHER_S)
    ready = threading.Event()

    def leader_left() -> None:
        if not ready.is_set():
            console.print("process 0 has ended before it served")
            end_process(0)

    channel.watch(_leader_lost, leader_left)
    failure = "it ended"
    try:
        _leave_signals_to_leader()
        _check_save(options)
        runner = load_runner(checkpoint, config, options, devices)
        warm_up(runner)
        ready.set()
        gather_pages(runner)
        console.print(f"process {processes.index} follows")
        while not isinstance(command := decode(channel.receive(), runner.layout, processes.index), Stop):
            runner.do(command)
            channel.announce(str(runner.compiles_after_warmup()))
        if options.save is not None:
            save_orbax(options.save, checkpoint.folder, runner.weights, runner.slot_of_expert_LE)
        failure = ""
    except Exception as error:
        failure = _words(error)
        logging.getLogger(__name__).exception("process %d failed", processes.index)
    finally:
        channel.close(failure)
    if failure:
        end_process(1)
    return 0


@contextlib.contextmanager
def ends_at_once(processes: Processes | None) -> Iterator[None]:
    """A command that fails in one of many processes ends its process at once; alone, as ever."""
    try:
        yield
    except BaseException as error:
        if processes is None:
            raise
        if isinstance(error, typer.Exit):
            code = error.exit_code
        elif isinstance(error, KeyboardInterrupt):
            code = INTERRUPTED
        else:
            traceback.print_exc()
            code = 1
        if code:
            end_process(code)
        raise


def end_process(code: int) -> NoReturn:
    """At once: threads may wait for processes that are gone, and jax for a farewell of all."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _words(error: BaseException) -> str:
    """Never none."""
    return str(error) or type(error).__name__


def _leader_lost(reason: str) -> None:
    console.print(reason)
    end_process(1)


def _leave_signals_to_leader() -> None:
    """A manager of jobs signals all processes alike, but those that follow are needed until the leader has drained."""

    def heed(number: int, frame: object) -> None:
        console.print("process 0 says when to end; another signal ends this process now")
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)

    numbers = signal.SIGTERM, signal.SIGINT
    for number in numbers:
        signal.signal(number, heed)


def _facts(checkpoint: Checkpoint, config: ServerConfig, options: ServeOptions) -> dict[str, str]:
    import jax

    from gimbal_jax.model.fingerprint import checkpoint_fingerprint
    from gimbal_jax.serving.agreement import facts_of

    acted_on = {"--save": options.save, "devices": jax.local_device_count()}
    return facts_of(checkpoint.config, config, checkpoint_fingerprint(checkpoint.folder), acted_on)


def _check_save(options: ServeOptions) -> None:
    """All processes together: refuse a folder that not all of them see."""
    from gimbal_jax.model.orbax_checkpoint import check_shared_target

    if options.save is not None:
        check_shared_target(options.save)


def _secret(options: ServeOptions) -> bytes:
    from gimbal_jax.serving.command_handshake import read_secret

    assert options.secret_file is not None
    return read_secret(options.secret_file, console.print)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """What keeps processes from coming together is for the user to mend."""
    try:
        yield
    except ChannelError as error:
        raise ValueError(str(error)) from error
