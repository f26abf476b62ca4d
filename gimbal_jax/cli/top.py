"""``gimbal top``: the live view of a server in the terminal."""

from __future__ import annotations

import contextlib
import json
import select
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPException
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from gimbal_jax.cli.terminal import fail
from gimbal_jax.cli.top_screen import frame
from gimbal_jax.serving.gateway.gateway import printable

PERIOD_S = 1.0
TIMEOUT_S = 5.0
KEY_S = 0.2
"""Seconds within which a key or a new size of the terminal is noticed."""
Fetch = Callable[[], dict[str, Any]]


class NoAnswer(Exception):
    """The server does not answer; the text gives the reason."""


def top(
    url: Annotated[str, typer.Argument(help="Address of the server's operators' port.")] = "http://127.0.0.1:9090",
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
) -> None:
    """Watch a server that serves with --operators-port: engines, experts, latencies; q ends it."""
    address = data_address(url)
    console = Console()
    try:
        data = fetch(address)
    except NoAnswer as error:
        fail(f"{error}; serve with --operators-port, and give its address here")
    if once:
        console.print(frame(data, console.width, None, console.color_system is not None))
        return
    with contextlib.suppress(KeyboardInterrupt), ThreadPoolExecutor(1) as executor:
        _watch(console, data, lambda: fetch(address), executor)


def data_address(url: str) -> str:
    """Return the address of the live view's data; ``url`` may lack http://. Raises typer.BadParameter."""
    if "://" not in url:
        url = f"http://{url}"
    if not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"{url} must begin with http:// or https://")
    return f"{url.rstrip('/').removesuffix('/dashboard')}/dashboard/data"


def fetch(address: str) -> dict[str, Any]:
    """Fetch the server's snapshot, its text without control characters. Raises NoAnswer."""
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as response:
            data = json.load(response, object_hook=_printable_fields)
    except urllib.error.HTTPError as error:
        raise NoAnswer(f"{address} answers {error.code} {error.reason}") from error
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise NoAnswer(f"no answer from {address}: {reason or type(error).__name__}") from error
    except ValueError as error:
        raise NoAnswer(f"{address} is no live view: {error}") from error
    if not isinstance(data, dict) or "engines" not in data:
        raise NoAnswer(f"{address} is no live view")
    return data


def _printable_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Remove control characters from texts of clients, which must not control the terminal."""
    return {name: _printable(value) for name, value in fields.items()}


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list) and value and isinstance(value[0], str):
        return [_printable(item) for item in value]
    return value


def _watch(console: Console, data: dict[str, Any], fetch_data: Fetch, executor: ThreadPoolExecutor) -> None:
    """Draw until q is pressed. Another thread asks the server, so that a slow answer does not delay keys."""
    asked: Future[dict[str, Any]] | None = None
    due, lost, drawn = time.monotonic() + PERIOD_S, "", None
    color = console.color_system is not None
    with _keys() as key, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            if drawn != (console.size, data, lost):
                drawn = (console.size, data, lost)
                live.update(frame(data, console.width, console.height, color, lost), refresh=True)
            if key(KEY_S) in ("q", "Q", "\x03"):
                return
            if asked is None and time.monotonic() >= due:
                asked = executor.submit(fetch_data)
            if asked is not None and asked.done():
                try:
                    data, lost = asked.result(), ""
                except NoAnswer as error:
                    lost = str(error)
                asked, due = None, time.monotonic() + PERIOD_S


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits some seconds for a key and returns it; "" for none, or if stdin is not a terminal."""
    if not sys.stdin.isatty():

        def no_key(timeout: float) -> str:
            time.sleep(timeout)
            return ""

        yield no_key
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield lambda timeout: sys.stdin.read(1) if select.select([sys.stdin], [], [], timeout)[0] else ""
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
