"""OpenAI's HTTP API: the ``smg`` gateway as a child process in front of our gRPC port, kept alive.

smg (1.13) can neither send a key nor speak TLS to a gRPC worker. So the port that it calls is plain, on
loopback, and for it alone: ``is_own_peer`` tells whether a call comes from a process of our own user,
which is what a Unix socket of mode 0600 would ensure.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

from gimbal_jax.serving.gateway.config import STOP_S, GatewayConfig, gateway_arguments

CHILD = "gimbal_jax.serving.gateway.child"
NO_MCP = ("MCP_HTTP_PROXY=http://127.0.0.1:1", "MCP_HTTPS_PROXY=http://127.0.0.1:1", "MCP_NO_PROXY=")
"""Variables of its environment that lead where nobody listens: smg would connect to whatever MCP server a request
names, those of our own network too."""
FIRST_DELAY_S, LAST_DELAY_S = 0.5, 30.0
"""Wait before a gateway that ended starts again: twice as long each time."""
STEADY_S = 60.0
"""A gateway that lived this long starts again after the first delay."""
PROBE_PERIOD_S = 0.25
HUNG_S = 60.0
"""A gateway that has answered, and then gives no answer at all for so long, is started anew."""
MAX_LINE_BYTES = 4096
"""Longer lines of its log are cut."""
UNSAID = ("smg::response", "smg::routers::grpc::multimodal")
"""Parts of smg whose warnings nobody needs: every answer above 400, our probes' too; how it would read pictures."""


def log_line(line: str) -> str | None:
    """What we say for a line that smg wrote; None for what is no news."""
    try:
        record: dict[str, Any] = json.loads(line)
        level, message, target = record["level"], record["message"], record["target"]
    except (ValueError, KeyError, TypeError):
        return _printable(f"gateway: {line}") if line else None
    if level not in ("WARN", "ERROR") or target in UNSAID or record.get("will_retry"):
        return None
    details = {"timestamp", "level", "message", "target", "filename", "line_number", "span", "spans"}
    rest = "".join(f" {name}={value}" for name, value in record.items() if name not in details)
    return _printable(f"gateway: {level.lower()}: {message}{rest}")


def _printable(text: str) -> str:
    """What clients sent may be quoted in it, and must not look like lines of our own."""
    return "".join(char if char.isprintable() else "?" for char in text)


def is_own_peer(peer: str, port: int, connections: Path = Path("/proc/net/tcp")) -> bool:
    """Whether gRPC's ``peer`` of a call to ``port`` on 127.0.0.1 is a process of our user (or of root).

    Systems without ``/proc`` cannot tell: there every process on the machine passes.
    """
    if not connections.exists():
        return True
    kind, _, address = peer.partition(":")
    host, _, peer_port = address.rpartition(":")
    if (kind, host) != ("ipv4", "127.0.0.1"):
        return False
    # "sl local_address rem_address st tx:rx tr:when retrnsmt uid": the client's own end of the connection.
    ends = [f"0100007F:{int(number):04X}" for number in (peer_port, port)]
    rows = (row.split() for row in connections.read_text().splitlines()[1:])
    return any(row[1:3] == ends and int(row[7]) in (os.getuid(), 0) for row in rows)


class Gateway:
    """Keeps one gateway process in front of our gRPC port."""

    def __init__(self, config: GatewayConfig, say: Callable[[str], None]) -> None:
        """``say`` gets what happens to it and what it logs, a line each."""
        self.config = config
        self.ready = False
        """Whether it answers, has our server registered and has read the tokenizer."""
        self.pid: int | None = None
        self._say = say

    async def run(self, grpc_port: int) -> None:
        """Keep it running until this is cancelled, in front of ``grpc_port``: plain gRPC on loopback, without keys."""
        loop = asyncio.get_running_loop()
        delay = FIRST_DELAY_S
        while True:
            born = loop.time()
            end = await self._live(grpc_port)
            if loop.time() - born > STEADY_S:
                delay = FIRST_DELAY_S
            self._say(f"the HTTP gateway ended ({end}); it starts again in {delay:g} s")
            await asyncio.sleep(delay)
            delay = min(2 * delay, LAST_DELAY_S)

    async def _live(self, grpc_port: int) -> str:
        """From its start to its end; returns how it ended."""
        child = await asyncio.create_subprocess_exec(
            *("env", *NO_MCP, sys.executable, "-m", CHILD),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # an interrupt from the terminal is for us: it must live until we have drained
        )
        assert child.stdin is not None and child.stdout is not None
        self.pid = child.pid
        probe = asyncio.create_task(self._follow_health(child))
        try:
            arguments = gateway_arguments(self.config, grpc_port, _free_port(), secrets.token_hex(32))
            child.stdin.write(json.dumps(arguments).encode() + b"\n")
            async for line in _lines(child.stdout):
                if (said := log_line(line)) is not None:
                    self._say(said)
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
                self._say(f"the HTTP gateway answers on {self.config.host}:{self.config.port}")
            self.ready = ready
            await asyncio.sleep(PROBE_PERIOD_S)
        self._say(f"the HTTP gateway has not answered for {HUNG_S:g} s: it is killed")
        child.kill()


def _status_of(url: str) -> int | None:
    """HTTP status of an answer, None without one."""
    context = ssl.create_default_context()
    # It is our own child on our own machine; its certificate is for other names.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=2, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, HTTPException):
        return None


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines of any length, each cut to ``MAX_LINE_BYTES``."""
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
