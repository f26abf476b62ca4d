"""An engine core over the fake runner, ticked by hand or on its own thread, and its news."""

import time
from contextlib import contextmanager

from gimbal_jax.config import EngineConfig, MeshConfig, ServerConfig
from gimbal_jax.serving.core.core import EngineCore, TickNews
from gimbal_jax.serving.engine.request import Request, SamplingParams, TokenDelta
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
    """The news of a core: ``news`` by tick, ``all`` token deltas in order."""

    def __init__(self, core: EngineCore) -> None:
        self.all: list[TokenDelta] = []
        self.news: list[TickNews] = []
        core.subscribe(self._take)

    def _take(self, news: TickNews) -> None:
        self.news.append(news)
        self.all += news.outputs

    @property
    def bound(self) -> list[tuple[float, str, int | None]]:
        """(time, request id, engine) of each decision of the central queue."""
        return [(news.now, name, decision.engine) for news in self.news for name, decision in news.bound]

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.all if output.request_id == name for token in output.token_ids]

    def ends(self) -> dict[str, tuple[str, str]]:
        """Return (finish reason, error) of each request that ended."""
        return {o.request_id: (o.finish_reason, o.error) for o in self.all if o.finish_reason is not None}


@contextmanager
def new_core(config=CONFIG, clock=time.monotonic, ahead=0):
    """Yield a core with its runner and outputs; stop it at the end."""
    runner = FakeRunner(MODEL, config, ahead)
    core = EngineCore(MODEL, config, runner, clock=clock)
    try:
        yield core, runner, Outputs(core)
    finally:
        core.stop()


@contextmanager
def open_core(config=CONFIG, ahead=0):
    """Yield a serving core to be ticked by hand, with its runner and outputs."""
    with new_core(config, ahead=ahead) as (core, runner, outputs):
        core.open()
        yield core, runner, outputs


def tick(core: EngineCore, count: int) -> None:
    for now in range(count):
        core.tick(float(now))


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)
