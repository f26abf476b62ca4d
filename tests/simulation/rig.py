"""A small testbed with prices that are simple enough to compute by hand."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from gimbal_jax.config import DispatchConfig, EngineConfig, MeshConfig, ModelConfig, PlacementConfig, QueueConfig
from gimbal_jax.simulation.routing import RoutingConfig, synthetic_router
from gimbal_jax.simulation.simulate import Testbed
from gimbal_jax.simulation.systems import System
from gimbal_jax.simulation.workload import Arrival

LAYERS, EXPERTS, K = 2, 16, 2
MODEL = ModelConfig(100, 8, 8, LAYERS, 2, 1, 4, EXPERTS, K, 4, tuple(range(LAYERS)))
ENGINE = EngineConfig(
    max_model_len=400, page_size=8, num_pages=400, max_rows=16, token_budget=64, tile=8, prefix_cache=False
)
TESTBED = Testbed(MODEL, MeshConfig(2, 2), ENGINE)
ROUTER = synthetic_router(RoutingConfig(topics=3), LAYERS, EXPERTS, K, seed=0)


@dataclass
class FlatCosts:
    """Costs of 10 ms a step, and 0.1 ms for each pair on the fullest rank."""

    step_s: float = 0.010
    pair_s: float = 0.0001
    round_s: float = 0.001
    decision_s: float = 0.005
    outside: Mapping[str, int] = field(default_factory=dict)
    steps: list = field(default_factory=list)

    def step_parts(self, work):
        self.steps.append(work)
        return {"step": self.step_s, "experts": self.pair_s * float(work.load_LR.max(axis=1).sum())}

    def migration_seconds(self, moves, overlapped):
        return 0.0 if overlapped else self.round_s

    def far_bytes(self, work):
        return float(work.copies_LSR.sum())

    def decision_seconds(self, policy):
        return self.decision_s


def system(dispatch="gimbal", queue="sjf_aging", placement="gimbal", window_steps=50, **more) -> System:
    return System(
        name="test",
        summary="",
        dispatch=DispatchConfig(policy=dispatch),
        queue=QueueConfig(policy=queue),
        placement=PlacementConfig(policy=placement, window_steps=window_steps),
        **more,
    )


def arrivals(count=150, rate=60.0, seed=0, longest=120) -> list[Arrival]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count))
    return [
        Arrival(float(time), int(rng.integers(1, longest)), int(rng.integers(1, 40)), int(rng.integers(3)))
        for time in times
    ]
