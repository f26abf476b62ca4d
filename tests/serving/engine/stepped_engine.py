"""An engine and its model, step by step."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gimbal_jax.config import EngineConfig, QueueConfig
from gimbal_jax.serving.engine.engine import Engine, Owners
from gimbal_jax.serving.engine.plan import Plan, StepResult
from gimbal_jax.serving.engine.request import TokenDelta
from tests.serving.engine.paged_model import PagedModel

CONFIG = EngineConfig(
    max_model_len=64, page_size=4, num_pages=32, max_rows=4, token_budget=16, tile=4, max_queue=8, exchange="gather"
)
FCFS, SJF = QueueConfig(policy="fcfs"), QueueConfig(policy="sjf_aging", aging_s=5.0)
HRRN, PRIORITY = QueueConfig(policy="hrrn"), QueueConfig(policy="priority")


@dataclass
class Planned:
    """A plan, and whose its parts are: (request id, tokens)."""

    plan: Plan
    owners: Owners
    decode: list[tuple[str, int]]
    prefill: list[tuple[str, int]]

    @property
    def all(self) -> list[tuple[str, int]]:
        return self.decode + self.prefill


def schedule(engine: Engine, now: float = 0.0) -> Planned:
    plan, names = engine.schedule(now), engine._batch.request_id_R
    return Planned(
        plan,
        engine.owners(plan),
        [(names[row], 1) for row in plan.decode.row_D],
        [(names[chunk.row], len(chunk.tokens)) for chunk in plan.prefill],
    )


def commit(engine: Engine, planned: Planned, result: StepResult) -> list[TokenDelta]:
    return engine.commit(planned.plan, planned.owners, result)


def step(engine: Engine, model: Callable[[Plan], StepResult], now: float = 0.0) -> tuple[Planned, list[TokenDelta]]:
    planned = schedule(engine, now)
    return planned, commit(engine, planned, model(planned.plan))


def run(engine: Engine, config: EngineConfig, most: int = 500) -> Iterator[tuple[Planned, list[TokenDelta]]]:
    """Step until idle."""
    model = PagedModel(config)
    for _ in range(most):
        if engine.idle:
            return
        yield step(engine, model)
    raise AssertionError(f"still busy after {most} steps")


class Ahead:
    """An engine whose next step is planned before the results of ``ahead`` steps are known."""

    def __init__(self, engine: Engine, model: PagedModel, ahead: int) -> None:
        self.engine, self.model, self.ahead = engine, model, ahead
        self.in_flight: deque[tuple[Planned, StepResult]] = deque()

    @property
    def idle(self) -> bool:
        return self.engine.idle and not self.in_flight

    def tick(self, now: float = 0.0) -> tuple[Planned, list[TokenDelta]]:
        """As ``EngineCore.tick`` does it."""
        outputs = self._fetch() if self.engine.waits_for_tokens else []
        planned = schedule(self.engine, now)
        if planned.plan.tokens:
            self.in_flight.append((planned, self.model(planned.plan)))
        if len(self.in_flight) > self.ahead or (self.in_flight and not planned.plan.tokens):
            outputs += self._fetch()
        return planned, outputs

    def run(self, most: int = 500) -> list[TokenDelta]:
        """All outputs until it is idle."""
        outputs: list[TokenDelta] = []
        for _ in range(most):
            if self.idle:
                return outputs
            outputs += self.tick()[1]
        raise AssertionError(f"still busy after {most} steps")

    def _fetch(self) -> list[TokenDelta]:
        return commit(self.engine, *self.in_flight.popleft())


def result(outputs: Iterable[TokenDelta], request_id: str) -> tuple[tuple[int, ...], str | None]:
    """All tokens of a request, and how it ended."""
    mine = [out for out in outputs if out.request_id == request_id]
    return tuple(token for out in mine for token in out.token_ids), mine[-1].finish_reason
