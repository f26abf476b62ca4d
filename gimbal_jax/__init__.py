"""An MoE LLM server in JAX whose three decisions work as one loop.

Which engine gets a request, which request an engine runs first, and which device
holds each expert: ``gimbal_jax.scheduler`` decides, ``gimbal_jax.model`` computes,
``gimbal_jax.serving`` runs them as a server. The names below are for use in programs
of your own. Those of the scheduler need numpy only; the others are imported when they
are first used, so that the scheduler never loads jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gimbal_jax.config import (
    DispatchConfig,
    EngineConfig,
    MeshConfig,
    ModelConfig,
    PlacementConfig,
    QueueConfig,
    ServerConfig,
)
from gimbal_jax.scheduler.dispatch import Decision, Dispatcher, View, choose_engine
from gimbal_jax.scheduler.migration import Round, plan_rounds
from gimbal_jax.scheduler.objective import placement_cost_L
from gimbal_jax.scheduler.placement import Proposal, propose, static_placement
from gimbal_jax.scheduler.queue import queue_key
from gimbal_jax.scheduler.trace import Trace
from gimbal_jax.scheduler.traffic import expert_pressure_S, imbalance_L, rank_load_LR, remote_share
from gimbal_jax.version import __version__

if TYPE_CHECKING:
    from gimbal_jax.model.experts import exchange_table, move_experts
    from gimbal_jax.pallas_kernels import Routing, route_and_count
    from gimbal_jax.serving.client import GimbalClient

__all__ = [
    "Decision",
    "DispatchConfig",
    "Dispatcher",
    "EngineConfig",
    "GimbalClient",
    "MeshConfig",
    "ModelConfig",
    "PlacementConfig",
    "Proposal",
    "QueueConfig",
    "Round",
    "Routing",
    "ServerConfig",
    "Trace",
    "View",
    "__version__",
    "choose_engine",
    "exchange_table",
    "expert_pressure_S",
    "imbalance_L",
    "move_experts",
    "placement_cost_L",
    "plan_rounds",
    "propose",
    "queue_key",
    "rank_load_LR",
    "remote_share",
    "route_and_count",
    "static_placement",
]

_LAZY = {
    "GimbalClient": "serving.client",
    "Routing": "pallas_kernels",
    "exchange_table": "model.experts",
    "move_experts": "model.experts",
    "route_and_count": "pallas_kernels",
}
"""Name -> module of what would load jax or gRPC."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
