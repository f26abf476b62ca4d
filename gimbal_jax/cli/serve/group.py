"""``gimbal serve`` in several processes: the leader gathers the followers, and they execute its commands."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import ssl
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from gimbal_jax.cli.serve.options import ServeOptions
from gimbal_jax.cli.serve.processes import Processes
from gimbal_jax.cli.serve.setup import (
    Checkpoint,
    check_servable,
    load_runner,
    use_huge_pages_for_weights,
    warm_up,
    with_kv_pool,
)
from gimbal_jax.cli.terminal import console
from gimbal_jax.config import ServerConfig
from gimbal_jax.serving.cluster.connection import ChannelError, PeerLost

if TYPE_CHECKING:
    import jax

    from gimbal_jax.serving.cluster.channel import LeaderChannel
    from gimbal_jax.serving.runtime.commands import Command, Layout

GATHER_S = 600.0
"""Seconds until all processes must have joined and agreed. Some read a checkpoint's fingerprint from slow disks."""
END_S = 5.0
"""Seconds for streams and messages to end after a process was lost. Threads that hang are not waited for."""
EXPLAIN_S = 1.0
"""Seconds to wait for the channel's reason, because a collective fails a moment before the channel reports a loss."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
MIN_SECRET_LENGTH = 16


class ConnectedFollowers:
    """The followers of a leader (implements ``commands.Followers``)."""

    hosts: list[str]
    """Host name of each process, the leader's first."""

    def __init__(self, channel: LeaderChannel, hosts: list[str]) -> None:
        self.hosts = hosts
        self._channel = channel
        self._on_loss: Callable[[str], None] | None = None
        self._lock = threading.Lock()
        self._is_lost = threading.Event()
        self._reason = ""
        self._commands = 0
        self._bytes = 0
        self._seconds = 0.0

    def when_lost(self, on_loss: Callable[[str], None]) -> None:
        """Call ``on_loss`` with the reason when a follower is lost, and end the process at most ``END_S`` later.

        Before this call, a loss ends the process immediately.
        """
        with self._lock:
            self._on_loss = on_loss

    def connection_ended(self, reason: str | None) -> None:
        """Handle the end of a connection. ``reason`` is None if the follower has finished in order."""
        if reason is None:
            return
        with self._lock:
            if self._on_loss is None:
                console.print(reason)
                end_process(1)
            self._reason = self._reason or reason
            self._is_lost.set()
            self._on_loss(reason)
            timer = threading.Timer(END_S, end_process, [1])
            timer.daemon = True
            timer.start()

    def send(self, command: Command, layout: Layout) -> None:
        from gimbal_jax.serving.runtime.commands import encode

        began = time.perf_counter()
        messages = [encode(command, layout, process) for process in range(1, len(self.hosts))]
        self._channel.send(messages)
        self._commands += 1
        self._bytes += sum(map(len, messages))
        self._seconds += time.perf_counter() - began

    def compiles_after_warmup(self) -> int:
        return sum(int(report or 0) for report in self._channel.reports)

    def explain(self, error: Exception) -> Exception:
        return PeerLost(self._reason) if self._is_lost.wait(EXPLAIN_S) else error

    def leave(self) -> NoReturn:
        """End before anything was served. Followers may wait in a computation that will not come."""
        self._channel.close()
        end_process(0)

    def cost(self) -> str:
        """Return a text with the number of commands so far, and their mean size and time."""
        commands = max(self._commands, 1)
        followers = max(len(self.hosts) - 1, 1)
        size = self._bytes / commands / followers
        microseconds = self._seconds / commands * 1e6
        return f"{self._commands:,} commands to each of {followers} processes: {size:,.0f} bytes, {microseconds:.0f} us"


@contextlib.contextmanager
def gather(
    processes: Processes, checkpoint: Checkpoint, config: ServerConfig, options: ServeOptions
) -> Iterator[ConnectedFollowers]:
    """Wait for the followers, which must agree on everything. Raise ValueError with the differences.

    On exit the followers are notified. If the block raised, they treat it as a leader failure.
    """
    from gimbal_jax.serving.cluster.channel import LeaderChannel

    address = processes.coordinator[0], processes.command_port
    channel = LeaderChannel(address, processes.count - 1, _secret(options), command_tls(processes, options))
    try:
        with _rejections():
            hosts = channel.gather(_facts(checkpoint, config, options), GATHER_S, console.print)
        followers = ConnectedFollowers(channel, [socket.gethostname(), *hosts])
        channel.watch(followers.connection_ended)
        _check_save(options)
        console.print(f"{processes.count} processes agree, on {', '.join(dict.fromkeys(followers.hosts))}")
        yield followers
    except BaseException as error:
        channel.close(_text_of(error))
        raise
    console.print(followers.cost())
    channel.close()


def follow(
    processes: Processes, checkpoint: Checkpoint, config: ServerConfig, options: ServeOptions, devices: list[jax.Device]
) -> int:
    """Execute the leader's commands until it stops. Return the exit code."""
    from gimbal_jax.model.orbax_checkpoint import save_orbax
    from gimbal_jax.serving.cluster.channel import join_leader
    from gimbal_jax.serving.runtime.commands import Stop, decode

    check_servable(checkpoint, config, options, devices)
    config = with_kv_pool(checkpoint.config, config, options)
    facts = _facts(checkpoint, config, options)
    address = processes.coordinator[0], processes.command_port
    tls = command_tls(processes, options)
    with _rejections():
        leader = join_leader(address, processes.index, _secret(options), tls, facts, GATHER_S)
    ready = threading.Event()

    def leader_ended(reason: str | None) -> None:
        if reason is not None:
            console.print(reason)
            end_process(1)
        if not ready.is_set():
            console.print("process 0 has ended before it served")
            end_process(0)

    leader.watch(leader_ended)
    failure = "it ended"
    try:
        _leave_signals_to_leader()
        _check_save(options)
        runner = load_runner(checkpoint, config, options, devices)
        warm_up(runner)
        ready.set()
        use_huge_pages_for_weights(runner)
        console.print(f"process {processes.index} follows")
        while not isinstance(command := decode(leader.next_command(), runner.layout, processes.index), Stop):
            runner.execute(command)
            leader.report = str(runner.compiles_after_warmup())
        if options.save is not None:
            save_orbax(options.save, checkpoint.folder, runner.weights, runner.slot_of_expert_LE)
        failure = ""
    except Exception as error:
        failure = _text_of(error)
        logging.getLogger(__name__).exception("process %d failed", processes.index)
    finally:
        leader.close(failure)
    if failure:
        end_process(1)
    return 0


@contextlib.contextmanager
def exit_on_error(processes: Processes | None) -> Iterator[None]:
    """End the process immediately if the block fails in one of several processes. Change nothing for a single one."""
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
    """Exit without waiting for threads, which may wait for lost processes, or for jax, which waits for all of them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def command_tls(processes: Processes, options: ServeOptions) -> ssl.SSLContext | None:
    """Return the TLS settings of this process for commands: TLS 1.3 with one pinned certificate, None without one.

    Raise ValueError that names the field of a bad file.
    """
    from gimbal_jax.serving.network.tls import pinned_context, server_context

    if options.command_cert is None:
        return None
    if not processes.leads:
        context = pinned_context("command_cert", options.command_cert)
    elif options.command_key is None:
        raise ValueError("--command-cert needs --command-key in process 0")
    else:
        context = server_context("command_cert", options.command_cert, "command_key", options.command_key)
        context.num_tickets = 0  # no connection is resumed
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def read_secret(path: Path) -> bytes:
    """Return the secret of a file, without the white space around it. Print a warning if every user can read the file.

    Raise ValueError that names the field, and never the secret.
    """
    from gimbal_jax.serving.network.api_keys import read_text

    secret = read_text("secret_file", path).strip()
    if len(secret) < MIN_SECRET_LENGTH:
        raise ValueError(f"secret_file {path}: has {len(secret)} characters, must have at least {MIN_SECRET_LENGTH}")
    if path.stat().st_mode & stat.S_IROTH:
        console.print(f"secret_file {path}: every user of this host can read it (chmod 600)")
    return secret.encode()


def _text_of(error: BaseException) -> str:
    """Return the error's text, or its type if it has none."""
    return str(error) or type(error).__name__


def _leave_signals_to_leader() -> None:
    """Ignore the first SIGTERM or SIGINT. Job managers signal all processes, but the leader needs them to drain."""

    def ignore_once(number: int, frame: object) -> None:
        console.print("process 0 decides when to end; another signal ends this process now")
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)

    numbers = signal.SIGTERM, signal.SIGINT
    for number in numbers:
        signal.signal(number, ignore_once)


def _facts(checkpoint: Checkpoint, config: ServerConfig, options: ServeOptions) -> dict[str, str]:
    import jax

    from gimbal_jax.model.fingerprint import checkpoint_fingerprint
    from gimbal_jax.serving.cluster.agreement import facts_of

    common = {"--save": options.save, "devices": jax.local_device_count()}
    return facts_of(checkpoint.config, config, checkpoint_fingerprint(checkpoint.folder), common)


def _check_save(options: ServeOptions) -> None:
    """Raise an error in all processes if not all of them see the folder of ``--save``."""
    from gimbal_jax.model.orbax_checkpoint import check_shared_target

    if options.save is not None:
        check_shared_target(options.save)


def _secret(options: ServeOptions) -> bytes:
    assert options.secret_file is not None
    return read_secret(options.secret_file)


@contextlib.contextmanager
def _rejections() -> Iterator[None]:
    """Turn a problem between the processes into an error of the user's input, which is one line without a traceback."""
    try:
        yield
    except ChannelError as error:
        raise ValueError(str(error)) from error
