"""Draw the live view under load: docs/pictures/dashboard.png, dashboard_dark.png and top.png.

    python -m scripts.screenshots [--seconds 90]

The script serves the demo model on four virtual CPU devices and puts load on it for ``--seconds``. Then Chromium draws
``/dashboard`` (light and dark) and a frame of ``gimbal top``.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from gimbal_jax.bench.server_process import running_server
from gimbal_jax.cli.top import data_address, fetch
from gimbal_jax.cli.top_screen import frame
from gimbal_jax.client.client import GimbalClient
from gimbal_jax.model.demo_model import TOPICS, topic_prompt, write_demo_model
from gimbal_jax.serving.network.ports import free_port
from gimbal_jax.serving.text.tokenizer import load_tokenizer

OUT, PICTURES = Path("out/screenshots"), Path("docs/pictures")
MODEL = OUT / "demo-model"
SERVER = ("--devices", "cpu:4", "--dp", "2", "--tp", "2", "--window-steps", "60", "--log-format", "off")
CLIENTS = 24
REQUESTS_OF_A_TOPIC = 40
"""Consecutive requests with one topic, so that traffic has a pattern to place experts by."""
CHROMIUM = (
    *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--virtual-time-budget=3000",
)
SIZE, DARK = "--window-size=1280,1180", "--blink-settings=preferredColorScheme=0"
TOP_COLUMNS, TOP_LINES = 120, 40


def main(seconds: Annotated[float, typer.Option(min=5, help="Seconds of load before the pictures.")] = 90) -> None:
    """Draw the dashboard and ``gimbal top`` under load."""
    if not (MODEL / "config.json").exists():
        write_demo_model(MODEL)
    asyncio.run(take_pictures(seconds))


async def take_pictures(seconds: float) -> None:
    port = free_port()
    options = (*SERVER, "--operators-port", str(port))
    url = f"http://127.0.0.1:{port}"
    async with running_server(MODEL, options, OUT / "server.log") as server, GimbalClient(server.target) as client:
        requests = random_requests()
        clients = [asyncio.create_task(keep_asking(client, requests)) for _ in range(CLIENTS)]
        await asyncio.sleep(seconds)
        for name, scheme in (("dashboard", ()), ("dashboard_dark", (DARK,))):
            await asyncio.to_thread(draw, f"{url}/dashboard", PICTURES / f"{name}.png", SIZE, *scheme)
        await asyncio.to_thread(draw_top, url, PICTURES / "top.png")
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


def random_requests() -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield prompts and their output lengths without end."""
    tokenizer, rng = load_tokenizer(MODEL), np.random.default_rng(0)
    assert tokenizer is not None, "the demo model has one"
    for number in itertools.count():
        topic = TOPICS[number // REQUESTS_OF_A_TOPIC % len(TOPICS)]
        length = int(rng.integers(60, 300))
        yield tuple(tokenizer.encode(topic_prompt(topic, length, rng))[:length]), int(rng.integers(10, 80))


async def keep_asking(client: GimbalClient, requests: Iterator[tuple[tuple[int, ...], int]]) -> None:
    for prompt, max_tokens in requests:
        async for _ in client.generate(token_ids=prompt, max_tokens=max_tokens):
            pass


def draw(address: str, path: Path, *flags: str) -> None:
    with tempfile.TemporaryDirectory() as profile:
        command = (*CHROMIUM, f"--user-data-dir={profile}", *flags, f"--screenshot={path.absolute()}", address)
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def draw_top(url: str, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        console = Console(
            record=True,
            width=TOP_COLUMNS,
            color_system="truecolor",
            force_terminal=True,
            file=(Path(folder) / "text").open("w"),
        )
        console.print(frame(fetch(data_address(url)), TOP_COLUMNS, TOP_LINES, color=True))
        svg = console.export_svg(title="gimbal top")
        (Path(folder) / "top.svg").write_text(svg)
        size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
        assert size is not None, "an SVG has a viewBox"
        draw((Path(folder) / "top.svg").as_uri(), path, f"--window-size={float(size[1]):.0f},{float(size[2]):.0f}")


if __name__ == "__main__":
    typer.run(main)
