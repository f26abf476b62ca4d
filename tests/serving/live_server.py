"""A whole server without a model, with the operators' HTTP: its engines on their thread, its frontend on another."""

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from dataclasses import dataclass

from gimbal_jax.config import EngineConfig, MeshConfig, PlacementConfig, ServerConfig
from gimbal_jax.serving.core.core import EngineCore
from gimbal_jax.serving.engine.request import SamplingParams
from gimbal_jax.serving.frontend.frontend import Frontend
from gimbal_jax.serving.frontend.record import Origin
from gimbal_jax.serving.monitoring.live import LiveView
from gimbal_jax.serving.monitoring.operators import serve_operators
from gimbal_jax.serving.monitoring.request_metrics import RequestHistograms
from tests.serving.engine.fake_runner import FakeRunner
from tests.serving.fake_server import MODEL

CONFIG = ServerConfig(
    MeshConfig(dp=2, tp=2),
    EngineConfig(max_model_len=64, page_size=4, num_pages=32, max_rows=4, token_budget=16, tile=4),
    placement=PlacementConfig(window_steps=10, min_gain=0.0),
)


@dataclass(frozen=True)
class Live:
    """A running server and how to reach it."""

    server: EngineCore
    runner: FakeRunner
    frontend: Frontend
    view: LiveView
    port: int
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def generate(self, request_id, prompt=(1, 2, 3), max_tokens=8, client="") -> concurrent.futures.Future:
        """Starts a request; the future is done when it has ended."""

        async def run():
            sampling = SamplingParams(max_tokens, temperature=0.0)
            with self.frontend.generate(request_id, tuple(prompt), sampling, origin=Origin(client)) as stream:
                async for _ in stream:
                    pass

        return asyncio.run_coroutine_threadsafe(run(), self.loop)


@contextlib.contextmanager
def live_server(name="small", model=MODEL, config=CONFIG):
    """A server that serves until the block ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runner = FakeRunner(model, config)
    server = EngineCore(model, config, runner)

    async def make():
        frontend = Frontend(server, time.monotonic, on_ended=lambda record: view.observe(record))
        view = LiveView(frontend, name)
        return frontend, view

    try:
        frontend, view = asyncio.run_coroutine_threadsafe(make(), loop).result(60)
        server.start()
        with serve_operators(frontend, view, RequestHistograms(config), "127.0.0.1", 0, lambda: True) as port:
            yield Live(server, runner, frontend, view, port, loop)
    finally:
        server.stop()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
