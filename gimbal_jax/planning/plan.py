"""Plans of every mesh that a number of GPUs can form for a model: what fits, what it costs, and a recommendation."""

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
from gimbal_jax.model.memory import GB, DeviceBytes, device_bytes
from gimbal_jax.model.sharding import check_mesh
from gimbal_jax.model.step import check_kernels
from gimbal_jax.planning.cost import decode_seconds, far_exchange_bytes, prefill_seconds, tensor_parallel_bytes
from gimbal_jax.planning.hardware import Gpu, Link
from gimbal_jax.serving.engine.limits import check_limits
from gimbal_jax.serving.runtime.batch import step_buckets

CLOSE = 0.05
"""Rates that differ by less than this share are equal, because floors are not more exact."""


@dataclass(frozen=True)
class PlanRequest:
    """A model to serve, and the GPUs to serve it on."""

    model: ModelConfig
    """The architecture; its ``dtype`` is that of weights and cache."""
    gpu: Gpu
    count: int
    """GPUs of all nodes."""
    engine: EngineConfig = GPU_ENGINE
    utilisation: float = MEMORY_UTILISATION
    """Share of a GPU's memory that the server may use."""
    request_tokens: int = 2000
    """Tokens of one request, prompt and output together."""
    output_tokens: int = 200
    """Output tokens among them."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    nodes: int = 1
    """Nodes that the GPUs are spread over, evenly."""
    link: Link | None = None
    """Network between the nodes; None for one node. Times need it, memory does not."""

    def __post_init__(self) -> None:
        check_limits(self.engine)
        if self.nodes < 1 or self.count % self.nodes:
            raise ValueError(f"nodes must divide the {self.count} GPUs, not {self.nodes}")
        if not 0 < self.output_tokens < self.request_tokens <= self.engine.max_model_len:
            raise ValueError(
                f"request_tokens must be above output_tokens = {self.output_tokens} and at most max_model_len = "
                f"{self.engine.max_model_len}, not {self.request_tokens}"
            )

    @property
    def budget(self) -> int:
        """Bytes of each GPU that the server may use."""
        return int(self.gpu.memory_bytes * self.utilisation)

    @property
    def per_node(self) -> int:
        """GPUs of each node."""
        return self.count // self.nodes


@dataclass(frozen=True)
class MeshPlan:
    """A mesh that serves the model. Times are floors (see ``planning.cost``)."""

    mesh: MeshConfig
    memory: DeviceBytes
    """Memory of each GPU."""
    kv_tokens: int
    """Tokens in the cache of each engine."""
    concurrent: int
    """Requests that the caches of all engines hold at once."""
    tensor_parallel_bytes: int
    """Bytes over links within an engine, per token and layer."""
    far_bytes: float
    """Bytes of the exchange from and to other nodes, per token and MoE layer."""
    prefill_seconds: float
    """Time of a step of ``token_budget`` prompt tokens, over all engines."""
    decode_requests: int
    """Requests of all engines in the decode step: ``max_rows``, or ``concurrent`` if that is less."""
    decode_seconds: float
    """Time of that step."""
    requests_per_second: float
    """Rate of prompts and outputs that take those two times, one after the other."""


@dataclass(frozen=True)
class Rejected:
    """A mesh that does not serve the model."""

    mesh: MeshConfig
    reason: str
    missing_bytes: int
    """Memory that each GPU lacks; 0 if the mesh breaks another rule."""


def meshes(request: PlanRequest) -> list[MeshConfig]:
    """Return every (dp, tp) with dp * tp = the GPUs, by rising tp."""
    sizes = [tp for tp in range(1, request.count + 1) if request.count % tp == 0]
    return [MeshConfig(request.count // tp, tp, request.nodes) for tp in sizes]


def plan_meshes(request: PlanRequest) -> list[MeshPlan | Rejected]:
    """Plan every mesh of the GPUs; experts are spread over all of them."""
    return [plan_mesh(request, mesh) for mesh in meshes(request)]


def plan_mesh(request: PlanRequest, mesh: MeshConfig) -> MeshPlan | Rejected:
    """Plan one mesh, or return the rule that it breaks. ValueError if it has several nodes and no link."""
    r, model, engine = request, request.model, request.engine
    fitted = fit_memory(request, mesh)
    if isinstance(fitted, Rejected):
        return fitted
    memory, kv_tokens = fitted
    concurrent = mesh.dp * (kv_tokens // r.request_tokens)
    rows = min(engine.max_rows, max(1, concurrent))
    prompt = r.request_tokens - r.output_tokens
    prefill = prefill_seconds(model, mesh, r.gpu, engine.exchange, engine.token_budget, prompt, r.link)
    decode = decode_seconds(model, mesh, r.gpu, engine.exchange, rows, r.request_tokens, r.link)
    return MeshPlan(
        mesh=mesh,
        memory=memory,
        kv_tokens=kv_tokens,
        concurrent=concurrent,
        tensor_parallel_bytes=tensor_parallel_bytes(model, mesh.tp),
        far_bytes=far_exchange_bytes(model, mesh.ranks, mesh.nodes, engine.exchange),
        prefill_seconds=prefill,
        decode_requests=rows,
        decode_seconds=decode,
        requests_per_second=1 / (prompt / engine.token_budget * prefill + r.output_tokens / rows * decode),
    )


def fit_memory(request: PlanRequest, mesh: MeshConfig) -> tuple[DeviceBytes, int] | Rejected:
    """Return memory of each GPU and KV tokens of each engine, or the rule that the mesh breaks."""
    r, model, engine = request, request.model, request.engine
    if r.per_node % mesh.tp and r.nodes > 1:
        return Rejected(mesh, _crossing(r, mesh.tp), 0)
    try:
        check_mesh(model, mesh)
        check_kernels(model, engine, mesh.tp, model.dtype, r.gpu.backend)
        bucket = step_buckets(engine, mesh.tp)[-1]
    except ValueError as error:
        return Rejected(mesh, str(error), 0)
    memory = device_bytes(model, ServerConfig(mesh, engine, placement=r.placement), bucket, r.gpu.backend)
    try:
        return memory, memory.kv_pages(r.budget) * engine.page_size
    except ValueError as error:
        return Rejected(mesh, f"does not fit: {error}", memory.least - r.budget)


def _crossing(request: PlanRequest, tp: int) -> str:
    """Return the reason for which an engine must not span nodes."""
    r = request
    outside = f", and {r.link.bandwidth / GB:g} GB/s over {r.link.name}" if r.link else ""
    return (
        f"tp = {tp} must divide the {r.per_node} GPUs of a node, so that engines lie within nodes: a GPU has "
        f"{r.gpu.link_bandwidth / GB:g} GB/s there{outside}"
    )


def recommended(plans: Sequence[MeshPlan | Rejected]) -> MeshPlan | None:
    """Choose, among the meshes whose rate is close to the best, the one whose caches hold most requests.

    None if no mesh fits.
    """
    fitting = [plan for plan in plans if isinstance(plan, MeshPlan)]
    best = max((plan.requests_per_second for plan in fitting), default=0.0)
    close = [plan for plan in fitting if plan.requests_per_second >= (1 - CLOSE) * best]
    return max(close, key=lambda plan: plan.concurrent, default=None)


def smallest_count(request: PlanRequest) -> tuple[int, int] | None:
    """Return the fewest GPUs that form a mesh that fits, and their nodes; None if no number does.

    If several nodes were asked for, the GPUs are nodes of that size. Otherwise they are one node, as large as a usual
    one or as the one asked for, or several of them.
    """
    r, most = request, request.model.num_experts
    if r.nodes > 1:
        sizes = [(count, count // r.per_node) for count in range(r.per_node, most + 1, r.per_node)]
    else:
        node = max(r.count, r.gpu.gpus_per_node)
        sizes = [(count, 1) for count in range(1, min(node, most) + 1)]
        sizes += [(count, count // node) for count in range(2 * node, most + 1, node)]
    return next((size for size in sizes if _any_fits(replace(r, count=size[0], nodes=size[1]))), None)


def _any_fits(request: PlanRequest) -> bool:
    return any(not isinstance(fit_memory(request, mesh), Rejected) for mesh in meshes(request))


COORDINATOR, SECRET_FILE = "HOST_OF_PROCESS_0:PORT", "SECRET_FILE"
"""Placeholders in commands for values that only the user knows."""


def serve_settings(request: PlanRequest, mesh: MeshConfig) -> dict[str, int | float | str]:
    """Return the options of ``gimbal serve`` for this mesh, but for the placement, by the keys of its file."""
    return {
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


def serve_commands(model: str, request: PlanRequest, mesh: MeshConfig) -> list[list[str]]:
    """Return the ``gimbal serve`` commands for this mesh, as words: one a node, in order.

    ``model`` is a hub id or a folder.
    """
    together: dict[str, int | float | str] = {
        "coordinator": COORDINATOR,
        "secret-file": SECRET_FILE,
        "trusted-network": "on",
        "processes": mesh.nodes,
    }
    of_process = [{**together, "process": node} for node in range(mesh.nodes)] if mesh.nodes > 1 else [{}]
    settings = serve_settings(request, mesh)
    if request.placement.policy != PlacementConfig.policy:
        settings["placement"] = request.placement.policy

    def words(options: dict[str, int | float | str]) -> list[str]:
        return [word for name, value in options.items() for word in (f"--{name}", str(value))]

    return [["gimbal", "serve", model, *words(settings | own)] for own in of_process]
