"""A server over the fake runner, ticked by hand or on its own thread, and what it said."""

import time
from contextlib import contextmanager

from gimbal_jax.config import EngineConfig, MeshConfig, ServerConfig
from gimbal_jax.serving.core.core import EngineCore, TickNews
from gimbal_jax.serving.engine.request import Request, RequestId, SamplingParams, TokenDelta
from tests.serving.engine.fake_runner import FakeRunner
from tests.serving.fake_server import MODEL

CONFIG = ServerConfig(
    MeshConfig(dp=2, tp=2),
    EngineConfig(max_model_len=64, page_size=4, num_pages=16, max_rows=4, token_budget=16, tile=4),
)
FREE = (CONFIG.engine.num_pages,) * 2


def request(name: str, prompt=(1, 2, 3), max_tokens: int = 4, engine: int = 0, sequence: int = 1) -> Request:
    return Request(name, tuple(prompt), SamplingParams(max_tokens, temperature=0.0), 0.0, engine, sequence, label=name)


class Outputs:
    """What a server told its frontend."""

    def __init__(self, server: EngineCore) -> None:
        self.all: list[TokenDelta] = []
        self.news: list[TickNews] = []
        server.subscribe(self._take)

    def _take(self, news: TickNews) -> None:
        self.news.append(news)
        self.all += news.outputs

    @property
    def bound(self) -> list[tuple[float, RequestId, int | None]]:
        """(time, request id, engine) of each decision of the central queue."""
        return [(news.now, name, decision.engine) for news in self.news for name, decision in news.bound]

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.all if output.request_id == name for token in output.token_ids]

    def ends(self) -> dict[RequestId, tuple[str, str]]:
        """How each ended request ended: reason and error."""
        return {o.request_id: (o.finish_reason, o.error) for o in self.all if o.finish_reason is not None}


@contextmanager
def new_server(config=CONFIG, clock=time.monotonic, ahead=0):
    """A server with its runner and outputs; stopped at the end."""
    runner = FakeRunner(MODEL, config, ahead)
    server = EngineCore(MODEL, config, runner, clock=clock)
    try:
        yield server, runner, Outputs(server)
    finally:
        server.stop()


@contextmanager
def open_server(config=CONFIG, ahead=0):
    """One to be ticked by hand."""
    with new_server(config, ahead=ahead) as (server, runner, outputs):
        server.open()
        yield server, runner, outputs


def tick(server: EngineCore, count: int) -> None:
    for now in range(count):
        server.tick(float(now))


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)
