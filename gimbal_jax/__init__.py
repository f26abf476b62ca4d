"""A server for Mixture-of-Experts language models in JAX. Three decisions work as one loop:

which engine gets a request, which request an engine runs first, and which device holds each expert. ``scheduler``
decides, ``model`` computes, and ``serving`` runs both as a server.

The names below are for your own programs (docs/library.md). Names of the scheduler need numpy only. The others are
imported at their first use, so that the scheduler never loads jax.

Modules here: ``config`` (all settings), ``exceptions`` (errors that cross rooms), ``version``. The rooms are in
ARCHITECTURE.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gimbal_jax.config import (
    DispatchConfig,
    EngineConfig,
    MeshConfig,
    ModelConfig,
    NetworkConfig,
    PlacementConfig,
    QueueConfig,
    ServerConfig,
)
from gimbal_jax.scheduler.baselines.redundant_experts import replicated_placement
from gimbal_jax.scheduler.counts_file import CountsFile, load_counts, save_counts
from gimbal_jax.scheduler.dispatch import choose_engine
from gimbal_jax.scheduler.dispatch_decision import Decision, View
from gimbal_jax.scheduler.dispatcher import Dispatcher
from gimbal_jax.scheduler.distance import distance_SR
from gimbal_jax.scheduler.late import Capacity, PendingRequest, bind
from gimbal_jax.scheduler.migration import Migration, Round, migration_between, plan_rounds
from gimbal_jax.scheduler.objective import Objective, placement_cost_L, window_objective
from gimbal_jax.scheduler.placement import Proposal, propose, static_placement
from gimbal_jax.scheduler.queue import QueueItem, queue_key
from gimbal_jax.scheduler.trace import Trace, idle_trace
from gimbal_jax.scheduler.traffic import expert_pressure_S, far_share, imbalance_L, rank_load_LR, remote_share
from gimbal_jax.scheduler.windows import WindowConfig, synthetic_windows
from gimbal_jax.version import __version__

if TYPE_CHECKING:
    from gimbal_jax.client.client import GimbalClient
    from gimbal_jax.model.experts import exchange_table, move_experts
    from gimbal_jax.pallas_kernels import Routing, route_and_count
    from gimbal_jax.scheduler.exact import exact_answer

__all__ = [
    "Capacity",
    "CountsFile",
    "Decision",
    "DispatchConfig",
    "Dispatcher",
    "EngineConfig",
    "GimbalClient",
    "MeshConfig",
    "Migration",
    "ModelConfig",
    "NetworkConfig",
    "Objective",
    "PendingRequest",
    "PlacementConfig",
    "Proposal",
    "QueueConfig",
    "QueueItem",
    "Round",
    "Routing",
    "ServerConfig",
    "Trace",
    "View",
    "WindowConfig",
    "__version__",
    "bind",
    "choose_engine",
    "distance_SR",
    "exact_answer",
    "exchange_table",
    "expert_pressure_S",
    "far_share",
    "idle_trace",
    "imbalance_L",
    "load_counts",
    "migration_between",
    "move_experts",
    "placement_cost_L",
    "plan_rounds",
    "propose",
    "queue_key",
    "rank_load_LR",
    "remote_share",
    "replicated_placement",
    "route_and_count",
    "save_counts",
    "static_placement",
    "synthetic_windows",
    "window_objective",
]

_LAZY = {
    "GimbalClient": "client.client",
    "Routing": "pallas_kernels",
    "exact_answer": "scheduler.exact",
    "exchange_table": "model.experts",
    "move_experts": "model.experts",
    "route_and_count": "pallas_kernels",
}
"""Module of each name that loads jax, gRPC or scipy."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
