"""Every mesh that a number of GPUs can form for a model: what fits, what it costs, and which one to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gimbal_jax.config import (
    GPU_ENGINE,
    MEMORY_UTILISATION,
    EngineConfig,
    MeshConfig,
    ModelConfig,
    PlacementConfig,
    ServerConfig,
)
from gimbal_jax.model.memory import DeviceBytes, device_bytes
from gimbal_jax.model.sharding import check_mesh
from gimbal_jax.model.step import check_kernels
from gimbal_jax.planning.cost import decode_seconds, prefill_seconds, tensor_parallel_bytes
from gimbal_jax.planning.gpus import Gpu
from gimbal_jax.serving.batch import step_buckets
from gimbal_jax.serving.engine import check_limits

CLOSE = 0.05
"""Rates that differ by less are equal: floors cannot tell them apart."""


@dataclass(frozen=True)
class PlanRequest:
    """What is to be served, on what."""

    model: ModelConfig
    """Its ``dtype`` is that of weights and cache."""
    gpu: Gpu
    count: int
    engine: EngineConfig = GPU_ENGINE
    utilisation: float = MEMORY_UTILISATION
    """Share of a GPU's memory that may be used."""
    request_tokens: int = 2000
    """Tokens of one request, prompt and output together."""
    output_tokens: int = 200
    """How many of them are output."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)

    def __post_init__(self) -> None:
        check_limits(self.engine)
        if not 0 < self.output_tokens < self.request_tokens <= self.engine.max_model_len:
            raise ValueError(
                f"request_tokens must be above output_tokens = {self.output_tokens} and at most max_model_len = "
                f"{self.engine.max_model_len}, not {self.request_tokens}"
            )

    @property
    def budget(self) -> int:
        """Bytes of each GPU that may be used."""
        return int(self.gpu.memory_bytes * self.utilisation)


@dataclass(frozen=True)
class MeshPlan:
    """A mesh that serves the model. Times are floors (see ``planning.cost``)."""

    mesh: MeshConfig
    memory: DeviceBytes
    """Of each GPU."""
    kv_tokens: int
    """Tokens in the cache of each engine."""
    concurrent: int
    """Requests that the caches of all engines hold at once."""
    tensor_parallel_bytes: int
    """Over links, per token and layer, within an engine."""
    prefill_seconds: float
    """A step of ``token_budget`` prompt tokens, over all engines."""
    decode_seconds: float
    """A step of ``max_rows`` requests, over all engines, or of as many as the caches hold."""
    requests_per_second: float
    """At those two times, prompts and outputs in turn."""


@dataclass(frozen=True)
class Refused:
    """A mesh that does not serve the model."""

    mesh: MeshConfig
    reason: str
    missing_bytes: int
    """Memory that each GPU lacks; 0 where the mesh breaks another rule."""


def plan_meshes(request: PlanRequest) -> list[MeshPlan | Refused]:
    """Every (dp, tp) with dp * tp = the GPUs, by rising tp; experts are spread over all of them."""
    sizes = [tp for tp in range(1, request.count + 1) if request.count % tp == 0]
    return [plan_mesh(request, MeshConfig(request.count // tp, tp)) for tp in sizes]


def plan_mesh(request: PlanRequest, mesh: MeshConfig) -> MeshPlan | Refused:
    """What this mesh gives, or the rule that it breaks."""
    r, model, engine = request, request.model, request.engine
    try:
        check_mesh(model, mesh)
        check_kernels(model, engine, mesh.tp, model.dtype, r.gpu.backend)
        bucket = step_buckets(engine, mesh.tp)[-1]
    except ValueError as error:
        return Refused(mesh, str(error), 0)
    memory = device_bytes(model, ServerConfig(mesh, engine, placement=r.placement), bucket, r.gpu.backend)
    try:
        kv_tokens = memory.kv_pages(r.budget) * engine.page_size
    except ValueError as error:
        return Refused(mesh, f"does not fit: {error}", memory.least - r.budget)

    concurrent = mesh.dp * (kv_tokens // r.request_tokens)
    rows = min(engine.max_rows, max(1, concurrent))
    prompt = r.request_tokens - r.output_tokens
    prefill = prefill_seconds(model, mesh, r.gpu, engine.exchange, engine.token_budget, prompt)
    decode = decode_seconds(model, mesh, r.gpu, engine.exchange, rows, r.request_tokens)
    return MeshPlan(
        mesh=mesh,
        memory=memory,
        kv_tokens=kv_tokens,
        concurrent=concurrent,
        tensor_parallel_bytes=tensor_parallel_bytes(model, mesh.tp),
        prefill_seconds=prefill,
        decode_seconds=decode,
        requests_per_second=1 / (prompt / engine.token_budget * prefill + r.output_tokens / rows * decode),
    )


def recommended(plans: Sequence[MeshPlan | Refused]) -> MeshPlan | None:
    """Of the meshes whose rate is close to the best, the one whose caches hold most requests; None if none fits."""
    fitting = [plan for plan in plans if isinstance(plan, MeshPlan)]
    best = max((plan.requests_per_second for plan in fitting), default=0.0)
    close = [plan for plan in fitting if plan.requests_per_second >= (1 - CLOSE) * best]
    return max(close, key=lambda plan: plan.concurrent, default=None)


def smallest_count(request: PlanRequest) -> int | None:
    """Fewest GPUs of this kind that form a mesh that fits; None if no number does."""
    for count in range(1, request.model.num_experts + 1):
        if recommended(plan_meshes(replace(request, count=count))) is not None:
            return count
    return None


def serve_command(model: str, request: PlanRequest, mesh: MeshConfig) -> list[str]:
    """The ``gimbal serve`` command for this mesh, as words."""
    options = {
        "dp": mesh.dp,
        "tp": mesh.tp,
        "dtype": request.model.dtype,
        "max-model-len": request.engine.max_model_len,
        "page-size": request.engine.page_size,
        "max-rows": request.engine.max_rows,
        "token-budget": request.engine.token_budget,
        "tile": request.engine.tile,
        "exchange": request.engine.exchange,
        "memory-utilisation": request.utilisation,
    }
    return ["gimbal", "serve", model, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
