"""A real server over the smallest golden checkpoint: one compiled runner, ticked by hand or on its thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gimbal_jax.config import DispatchConfig, DispatchPolicy, EngineConfig, MeshConfig, PlacementConfig, ServerConfig
from gimbal_jax.model.hf_config import load_config
from gimbal_jax.model.loading import load_weights
from gimbal_jax.model.sharding import make_mesh
from gimbal_jax.scheduler.migration import plan_rounds
from gimbal_jax.serving.core.core import EngineCore, TickNews
from gimbal_jax.serving.engine.request import Request, SamplingParams, TokenLogprobs
from gimbal_jax.serving.engine.runner import Runner
from gimbal_jax.serving.runtime.device_runner import DeviceRunner
from tests.model.naive_sampling import bits

FOLDER = Path(__file__).parents[1] / "goldens" / "base"
MODEL = load_config(FOLDER)
LAYERS, EXPERTS, TOP_K = len(MODEL.moe_layers), MODEL.num_experts, MODEL.experts_per_token
CONFIG = ServerConfig(
    mesh=MeshConfig(dp=2, tp=2),
    engine=EngineConfig(
        max_model_len=96,
        page_size=4,
        num_pages=40,  # eight long sequences do not fit: there will be preemptions
        max_rows=8,
        token_budget=16,
        tile=8,
        max_queue=10_000,
    ),
    placement=PlacementConfig(policy="static"),
)
SOURCES, RANKS = CONFIG.mesh.dp, CONFIG.mesh.ranks
TICK_S = 0.01


def compiled_runner(mesh_config: MeshConfig = CONFIG.mesh) -> DeviceRunner:
    """Two shapes of steps only: few decode rows, and everything."""
    mesh = make_mesh(mesh_config)
    weights, slot_of_expert_LE = load_weights(FOLDER, MODEL, mesh, "float32")
    config = replace(CONFIG, mesh=mesh_config)
    runner = DeviceRunner(MODEL, config, mesh, weights, slot_of_expert_LE, "float32")
    runner.buckets = (runner.buckets[0], runner.buckets[-1])
    runner.warm_up()
    return runner


@dataclass
class Session:
    """A server ticked by hand, and its outputs."""

    server: EngineCore
    now: float = 0.0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """Log probabilities of the prompts of requests that asked for them."""
    ends: dict[str, str] = field(default_factory=dict)

    def take(self, news: TickNews) -> None:
        for output in news.outputs:
            assert output.request_id not in self.ends, "news after the end"
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.prompt_logprobs:
                assert output.request_id not in self.prompt_logprobs, "they come once"
                self.prompt_logprobs[output.request_id] = output.prompt_logprobs
            if output.finish_reason is not None:
                self.ends[output.request_id] = output.finish_reason

    @property
    def idle(self) -> bool:
        busy = self.server.central_queue or self.server._in_flight
        return not busy and all(engine.idle for engine in self.server.engines)

    def tick(self, count: int = 1) -> None:
        for _ in range(count):
            self.server.tick(self.now)
            self.now += TICK_S

    def run(self, requests: list[Request], between: Callable[[], object] = lambda: None) -> dict[str, list[int]]:
        """Submit all requests, tick until idle with ``between`` after each tick, and return the tokens of each."""
        for request in requests:
            self.server.submit(request)
        self.tick()
        while not self.idle:
            between()
            self.tick()
        return {request.id: self.tokens.get(request.id, []) for request in requests}


@contextmanager
def session(
    runner: Runner, engine: dict[str, Any] | None = None, dispatch: DispatchPolicy = "gimbal", **placement: Any
) -> Iterator[Session]:
    """A new server over ``runner``. ``engine`` overrides limits that are not part of the compiled shapes."""
    config = replace(
        CONFIG,
        engine=replace(CONFIG.engine, **(engine or {})),
        dispatch=DispatchConfig(dispatch),
        placement=replace(CONFIG.placement, **placement),
    )
    runner.begin_counts()()
    server = EngineCore(MODEL, config, runner)
    session = Session(server)
    server.subscribe(session.take)
    server.open()
    try:
        yield session
    finally:
        while server._in_flight:  # the runner is for the next one too
            server._fetch()
        server.stop()


def shuffle_a_layer(runner: Runner, rng: np.random.Generator) -> None:
    """Migrate one layer to a random placement."""
    layer = int(rng.integers(LAYERS))
    wanted_E = rng.permutation(EXPERTS).astype(np.int32)
    for moves in plan_rounds(runner.slot_of_expert_LE[layer], wanted_E, RANKS, CONFIG.placement.rows_per_pair):
        runner.migrate(layer, moves)


class OnlyThese:
    """A grammar that always allows the same tokens."""

    def __init__(self, allowed: list[int]) -> None:
        self._allowed = bits(allowed, MODEL.vocab_size)

    def allowed(self) -> np.ndarray:
        return self._allowed

    def accept(self, token_id: int) -> None:
        assert self._allowed[token_id // 32] >> token_id % 32 & 1, "not allowed"


def random_requests(rng: np.random.Generator, count: int, *, prompt: int = 40, output: int = 24) -> list[Request]:
    """Requests of every kind: lengths up to the given ones, greedy and seeded, with all that they can ask for."""
    last_sequence_S = [0] * SOURCES
    requests = []
    for i in range(count):
        engine = int(rng.integers(SOURCES))
        last_sequence_S[engine] += 1
        tokens = tuple(rng.integers(MODEL.vocab_size, size=rng.integers(1, prompt + 1)).tolist())
        sampling, sequence = random_sampling(rng, output), last_sequence_S[engine]
        requests.append(
            Request(f"r{i}", tokens, sampling, 0.0, engine, sequence, grammar=random_grammar(sampling.seed))
        )
    return requests


def random_grammar(seed: int) -> OnlyThese | None:
    """For every fifth request."""
    rng = np.random.default_rng([seed, 1])
    return OnlyThese(rng.permutation(MODEL.vocab_size)[:40].tolist()) if rng.random() < 0.2 else None


def random_adjustments(seed: int) -> dict[str, Any]:
    """Log probabilities of every fifth prompt; bias and penalties for a third of all requests."""
    rng = np.random.default_rng([seed, 2])
    asked = {"prompt_logprobs": None if rng.random() < 0.8 else int(rng.integers(0, 5))}
    if rng.random() < 2 / 3:
        return asked
    biased = rng.permutation(MODEL.vocab_size)[: rng.integers(0, 5)].tolist()
    return asked | {
        "repetition_penalty": float(rng.choice([1.0, 1.4])),
        "frequency_penalty": float(rng.choice([0.0, 0.7])),
        "presence_penalty": float(rng.choice([0.0, -0.5])),
        "logit_bias": tuple((token, float(rng.normal(scale=3))) for token in biased),
    }


def random_sampling(rng: np.random.Generator, output: int) -> SamplingParams:
    greedy = rng.random() < 0.4
    stops = rng.integers(MODEL.vocab_size, size=rng.integers(0, 3)).tolist()
    return SamplingParams(
        max_tokens=int(rng.integers(1, output + 1)),
        min_tokens=int(rng.integers(0, 2)),
        temperature=0.0 if greedy else float(rng.uniform(0.3, 1.5)),
        top_k=int(rng.choice([0, 5, 50])),
        top_p=float(rng.choice([1.0, 0.8])),
        min_p=float(rng.choice([0.0, 0.1])),
        seed=(seed := int(rng.integers(2**32))),
        logprobs=None if rng.random() < 0.7 else int(rng.integers(0, 5)),
        stop_token_ids=tuple(stops),
        **random_adjustments(seed),
    )
