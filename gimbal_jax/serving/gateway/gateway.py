"""OpenAI's HTTP API: the ``smg`` gateway as a supervised child process in front of our gRPC port.

smg (1.13) can neither send a key nor speak TLS to a gRPC worker. So it calls a plain port on loopback that
accepts no other caller. ``is_own_peer`` checks that a call comes from a process of our own user. A Unix
socket of mode 0600 would ensure the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

from gimbal_jax.serving.gateway.config import STOP_S, GatewayConfig, gateway_arguments, open_port_warning
from gimbal_jax.serving.network.ports import free_port

CHILD = "gimbal_jax.serving.gateway.child"
NO_MCP = ("MCP_HTTP_PROXY=http://127.0.0.1:1", "MCP_HTTPS_PROXY=http://127.0.0.1:1", "MCP_NO_PROXY=")
"""Environment variables that point smg at a port without a listener.

Without them smg would connect to every MCP server that a request names, those of our own network included.
"""
FIRST_DELAY_S, LAST_DELAY_S = 0.5, 30.0
"""Seconds before a gateway that ended starts again. The delay doubles each time, from the first to the last."""
STEADY_S = 60.0
"""A gateway that lived this many seconds starts again after the first delay."""
PROBE_PERIOD_S = 0.25
HUNG_S = 60.0
"""Seconds without an answer after which a gateway that has answered before is restarted."""
MAX_LINE_BYTES = 4096
"""Longest line of the gateway's log, in bytes. Longer lines are cut."""
IGNORED_TARGETS = ("smg::response", "smg::routers::grpc::multimodal", "smg::posture")
"""Parts of smg whose warnings are not logged.

They concern each answer from 400 up (our probes included), how smg would decode pictures, and ports that are open
without a key. The last names flags of smg that gimbal does not have; ``open_port_warning`` stands in for it.
"""


def log_line(line: str) -> str | None:
    """Return the text to log for a line of smg's log, None to log nothing."""
    try:
        record: dict[str, Any] = json.loads(line)
        level, message, target = record["level"], record["message"], record["target"]
    except (ValueError, KeyError, TypeError):
        return printable(f"gateway: {line}") if line else None
    if level not in ("WARN", "ERROR") or target in IGNORED_TARGETS or record.get("will_retry"):
        return None
    details = {"timestamp", "level", "message", "target", "filename", "line_number", "span", "spans"}
    rest = "".join(f" {name}={value}" for name, value in record.items() if name not in details)
    return printable(f"gateway: {level.lower()}: {message}{rest}")


def printable(text: str) -> str:
    """Replace control characters by "?": text of clients must not look like our own lines or steer a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def is_own_peer(peer: str, port: int, connections: Path = Path("/proc/net/tcp")) -> bool:
    """Return whether gRPC's ``peer`` of a call to ``port`` on 127.0.0.1 is a process of our user, or of root.

    Without ``/proc`` this is unknown, and every process on the host is accepted.
    """
    if not connections.exists():
        return True
    kind, _, address = peer.partition(":")
    host, _, peer_port = address.rpartition(":")
    if (kind, host) != ("ipv4", "127.0.0.1"):
        return False
    # A row is "sl local_address rem_address st tx:rx tr:when retrnsmt uid". We look for the client's end.
    ends = [f"0100007F:{int(number):04X}" for number in (peer_port, port)]
    rows = (row.split() for row in connections.read_text().splitlines()[1:])
    return any(row[1:3] == ends and int(row[7]) in (os.getuid(), 0) for row in rows)


class Gateway:
    """Supervisor of one gateway process in front of our gRPC port.

    ``ready`` is true while the gateway answers, has our server registered and has read the tokenizer.
    ``pid`` is the process id, None while there is none. ``log`` gets one line for each event and each line
    that the gateway logs.
    """

    def __init__(self, config: GatewayConfig, log: Callable[[str], None]) -> None:
        self.config = config
        self.ready = False
        self.pid: int | None = None
        self._log = log

    async def run(self, grpc_port: int) -> None:
        """Keep a gateway running until cancelled. ``grpc_port`` is plain gRPC on loopback, without keys."""
        loop = asyncio.get_running_loop()
        if (warning := open_port_warning(self.config)) is not None:
            self._log(f"gateway: warn: {warning}")
        delay = FIRST_DELAY_S
        while True:
            born = loop.time()
            end = await self._live(grpc_port)
            if loop.time() - born > STEADY_S:
                delay = FIRST_DELAY_S
            self._log(f"the HTTP gateway ended ({end}); it starts again in {delay:g} s")
            await asyncio.sleep(delay)
            delay = min(2 * delay, LAST_DELAY_S)

    async def _live(self, grpc_port: int) -> str:
        """Run one gateway from start to end, and return how it ended."""
        child = await asyncio.create_subprocess_exec(
            *("env", *NO_MCP, sys.executable, "-m", CHILD),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # An interrupt from the terminal must not reach the gateway, which has to live until we have drained.
            start_new_session=True,
        )
        assert child.stdin is not None and child.stdout is not None
        self.pid = child.pid
        probe = asyncio.create_task(self._follow_health(child))
        try:
            arguments = gateway_arguments(self.config, grpc_port, free_port(), secrets.token_hex(32))
            child.stdin.write(json.dumps(arguments).encode() + b"\n")
            async for line in _lines(child.stdout):
                if (text := log_line(line)) is not None:
                    self._log(text)
            return _how(await child.wait())
        finally:
            probe.cancel()
            self.ready, self.pid = False, None
            await _stop(child)

    async def _follow_health(self, child: asyncio.subprocess.Process) -> None:
        scheme = "http" if self.config.tls_cert is None else "https"
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.config.host, self.config.host)
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.config.port}/readiness"
        loop, answered = asyncio.get_running_loop(), float("inf")
        while loop.time() - answered < HUNG_S:
            status = await asyncio.to_thread(_status_of, url)
            if status is not None:
                answered = loop.time()
            ready = status == 200
            if ready and not self.ready:
                self._log(f"the HTTP gateway answers on {self.config.host}:{self.config.port}")
            self.ready = ready
            await asyncio.sleep(PROBE_PERIOD_S)
        self._log(f"the HTTP gateway has not answered for {HUNG_S:g} s: it is killed")
        child.kill()


def _status_of(url: str) -> int | None:
    """Return the HTTP status of an answer, None without one."""
    context = ssl.create_default_context()
    # The gateway is our own child on this host, and its certificate is for other names.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=2, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, HTTPException):
        return None


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield the lines of a stream, each cut to ``MAX_LINE_BYTES``."""
    line = b""
    while chunk := await stream.read(2**16):
        *ended, line = (line + chunk).split(b"\n")
        for whole in ended:
            yield whole[:MAX_LINE_BYTES].decode(errors="replace").strip()
        line = line[:MAX_LINE_BYTES]
    if line:
        yield line.decode(errors="replace").strip()


async def _stop(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        try:
            await asyncio.wait_for(child.wait(), STOP_S)
        except TimeoutError:
            child.kill()
            await child.wait()


def _how(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
