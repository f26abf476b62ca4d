"""The systems that are compared. Each system is a value, and two systems differ only in the fields of their records.

Gimbal, its parts and its baselines follow sections 4 to 7 of the paper. ``docs/scheduling.md`` has the rules of
dispatch. Peers use their own dispatch, queue and schedule of expert moves, and our engine.

*Schedules.* vLLM moves experts by EPLB every 3,000 steps, for the first time after a quarter of that
(``EPLBConfig.step_interval``; ``vllm/distributed/eplb``). SGLang moves them every 1,000 forward passes
(``eplb_rebalance_num_iterations``). vLLM counts only the last 1,000 of its 3,000 steps (``window_size``). Here a window
is the whole interval. The paper builds Gimbal into vLLM's EPLB, so its systems have the same schedule and also stop the
engines.

*Weights.* Gimbal's weights are (1, 0.2, 0.1), which the paper's calibration procedure finds in our normalisation. The
paper's own weights (1, 0.0025, 1) freeze the experts there (``docs/scheduling.md``). Gimbal applies every placement
that lowers the objective (section 5.3), and decides by the last window alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from gimbal_jax.config import DispatchConfig, OfflinePolicy, PlacementConfig, PlacementPolicy, QueueConfig, QueuePolicy


@dataclass(frozen=True)
class System:
    """The policies of one server, and the times at which it moves experts."""

    name: str
    summary: str
    dispatch: DispatchConfig
    queue: QueueConfig
    placement: PlacementConfig
    migration: Migration = "between_steps"
    """``between_steps``: some rounds of moves after each step (ours). ``blocking``: all engines wait for the decision
    and all moves (vLLM in the paper's time). ``overlapped``: weights travel while steps run (vLLM 0.33)."""
    first_window_steps: int | None = None
    """Steps before the first decision; None for ``placement.window_steps``."""
    offline: OfflinePolicy | None = None
    """Policy that places experts (``sem_moe``: also requests) by a profile before the run; None for no such policy."""


_FCFS = QueueConfig("fcfs")
_SJF = QueueConfig("sjf_aging")
_STATIC = PlacementConfig("static")
_EPLB = PlacementConfig("eplb", window_steps=3000, smoothing=0.0)
_GIMBAL_PLACEMENT = replace(_EPLB, policy="gimbal", beta=0.2, gamma=0.1, min_gain=0.0)
_FIRST_STEPS = 750
QUEUES: tuple[QueuePolicy, ...] = ("fcfs", "hrrn")
"""Queues that the study of queues compares with ``sjf_aging``."""
PRESSURE_WEIGHTS = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Values of ``lambda_moe`` in the study of pressure."""
MULTIHOST_PLACEMENTS: tuple[PlacementPolicy, ...] = ("static", "eplb", "eplb_hierarchical", "gimbal", "gimbal_refined")
"""Placement policies in the study of several nodes."""
_MULTIHOST_PLACEMENT = PlacementConfig(migrate_bytes_per_tick=2**30)
"""The default windows, with enough bytes per tick for the moves of dozens of GPUs."""
_VLLM_DISPATCH = DispatchConfig("vllm_classic")
_GIMBAL_DISPATCH = DispatchConfig("gimbal")
_NO_PRESSURE = DispatchConfig("gimbal", lambda_moe=0.0)

_VLLM = System(
    "vllm",
    "vLLM in the paper's time: fewest requests, EPLB while all engines wait",
    _VLLM_DISPATCH,
    _FCFS,
    _EPLB,
    "blocking",
    _FIRST_STEPS,
)
_GIMBAL = System(
    "gimbal",
    "the paper's Gimbal-All: pressure of experts in dispatch",
    _GIMBAL_DISPATCH,
    _SJF,
    _GIMBAL_PLACEMENT,
    "blocking",
    _FIRST_STEPS,
)
_GIMBAL_STATIC = System("gimbal_static", "Gimbal's dispatch and queue; experts stay", _NO_PRESSURE, _SJF, _STATIC)
_OFFLINE = replace(_VLLM, placement=_STATIC, migration="between_steps", first_window_steps=None)


def multihost_system(policy: PlacementPolicy) -> str:
    """Return the name of a system in the study of several nodes."""
    return f"multihost_{policy}"


_ALL: tuple[System, ...] = (
    _VLLM,
    replace(
        _VLLM,
        name="vllm_0_33",
        summary="vLLM 0.33: fewest requests with a penalty for KV use, EPLB while steps run",
        dispatch=DispatchConfig("vllm_0_33"),
        migration="overlapped",
    ),
    System(
        "sglang",
        "SGLang: fewest tokens in cache and queue, EPLB while steps run",
        DispatchConfig("sglang_total_tokens"),
        _FCFS,
        replace(_EPLB, window_steps=1000),
        "overlapped",
    ),
    replace(
        _OFFLINE,
        name="moetuner",
        summary="vLLM with MoETuner's experts, placed before the run by another run's traffic",
        offline="moetuner",
    ),
    replace(
        _OFFLINE,
        name="sem_moe",
        summary="vLLM with Sem-MoE's experts and engines of requests, by an oracle that knows this run's traffic",
        offline="sem_moe",
    ),
    replace(
        _VLLM, name="gimbal_dp", summary="only Gimbal's dispatch and queue; EPLB", dispatch=_NO_PRESSURE, queue=_SJF
    ),
    replace(_VLLM, name="gimbal_ep", summary="only Gimbal's placement, in vLLM", placement=_GIMBAL_PLACEMENT),
    replace(
        _GIMBAL,
        name="gimbal_no_collab",
        summary="Gimbal without pressure of experts in dispatch",
        dispatch=_NO_PRESSURE,
    ),
    _GIMBAL,
    replace(
        _GIMBAL,
        name="gimbal_uncalibrated",
        summary="Gimbal with placement weights (1, 1, 1), the ablation of section 7.2",
        placement=replace(_GIMBAL_PLACEMENT, alpha=1.0, beta=1.0, gamma=1.0),
    ),
    System(
        "gimbal+",
        "ours: late binding, refined placement by short windows, moved layer by layer between steps",
        DispatchConfig("late"),
        _SJF,
        PlacementConfig("gimbal_refined"),
    ),
    # For studies of dispatch and queue alone: experts stay where they are.
    replace(_OFFLINE, name="static", summary="vLLM's dispatch and queue; experts stay"),
    replace(
        _OFFLINE,
        name="round_robin",
        summary="round robin, first come first served; experts stay",
        dispatch=DispatchConfig("round_robin"),
    ),
    _GIMBAL_STATIC,
    System("late_static", "late binding, shortest first; experts stay", DispatchConfig("late"), _SJF, _STATIC),
    # For other studies: queues, pressure, several nodes.
    *(
        System(
            f"{name}_static_{queue}",
            f"{name} dispatch and {queue} queue; experts stay",
            dispatch,
            QueueConfig(queue),
            _STATIC,
        )
        for name, dispatch in (("gimbal", _NO_PRESSURE), ("late", DispatchConfig("late")))
        for queue in QUEUES
    ),
    *(
        replace(
            system,
            name=f"{name}_moe_{weight:g}",
            summary=f"{name} with lambda_moe {weight:g}",
            dispatch=DispatchConfig("gimbal", lambda_moe=weight),
        )
        for name, system in (("gimbal", _GIMBAL), ("gimbal_static", _GIMBAL_STATIC))
        for weight in PRESSURE_WEIGHTS
    ),
    *(
        System(
            multihost_system(policy),
            f"Gimbal's dispatch and queue, {policy} in windows of {_MULTIHOST_PLACEMENT.window_steps} steps",
            _GIMBAL_DISPATCH,
            _SJF,
            replace(_MULTIHOST_PLACEMENT, policy=policy),
        )
        for policy in MULTIHOST_PLACEMENTS
    ),
)
SYSTEMS: Mapping[str, System] = {system.name: system for system in _ALL}


Migration = Literal["between_steps", "blocking", "overlapped"]
