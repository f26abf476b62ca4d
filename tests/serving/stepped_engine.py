"""An engine and its model, step by step."""

from collections.abc import Iterable, Iterator

from gimbal_jax.config import EngineConfig, QueueConfig
from gimbal_jax.serving.engine import Engine
from gimbal_jax.serving.plan import Plan
from gimbal_jax.serving.request import Output
from tests.serving.paged_model import PagedModel

CONFIG = EngineConfig(
    max_model_len=64, page_size=4, num_pages=32, max_rows=4, token_budget=16, tile=4, max_queue=8, exchange="gather"
)
FCFS, SJF = QueueConfig(policy="fcfs"), QueueConfig(policy="sjf_aging", aging_s=5.0)
HRRN, PRIORITY = QueueConfig(policy="hrrn"), QueueConfig(policy="priority")


def step(engine: Engine, model: PagedModel, now: float = 0.0) -> tuple[Plan, list[Output]]:
    plan = engine.schedule(now)
    return plan, engine.commit(plan, model(plan))


def run(engine: Engine, config: EngineConfig, most: int = 500) -> Iterator[tuple[Plan, list[Output]]]:
    """Step until idle."""
    model = PagedModel(config)
    for _ in range(most):
        if engine.idle:
            return
        yield step(engine, model)
    raise AssertionError(f"still busy after {most} steps")


def result(outputs: Iterable[Output], request_id: str) -> tuple[tuple[int, ...], str | None]:
    """All tokens of a request, and how it ended."""
    mine = [out for out in outputs if out.request_id == request_id]
    return tuple(token for out in mine for token in out.token_ids), mine[-1].finish_reason


def ids(chunks) -> list[tuple[str, int]]:
    return [(chunk.request_id, len(chunk.tokens)) for chunk in chunks]
