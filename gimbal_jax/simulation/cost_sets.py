"""Sets of assumptions about all costs that are not in the kernel table.

``python -m research.cost_report --fit`` found the constants of ``paper_like`` and ``paper_like_fixed`` for the vLLM
baseline alone (see ``research.fit``). No constant is fitted to the gain of Gimbal. The two sets are the extremes:
``paper_like`` slows every part of a step by a factor, and ``paper_like_fixed`` adds a constant to each layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from gimbal_jax.config import PlacementPolicy

CostSet = Literal["graph", "eager", "paper_like", "paper_like_fixed"]


@dataclass(frozen=True)
class Assumptions:
    """One cost set. All sets use the kernel times of the table. Times are in seconds, rates in bytes per second."""

    summary: str
    all_reduce_stack: str = "vllm-0.24.0:vllm_graph"
    small_kernels: int = 8
    """Kernels of each layer that the table does not have: two norms with residuals, norms of queries and of keys, rope,
    places of pairs, sum over copies, and counting. The table's attention includes the cache write, and its MoE layer
    includes the choice of experts."""
    small_kernel_s: float = 2e-6
    """Least time of a small kernel within a CUDA graph. The least time in the table is 4.2 us, for an all-reduce."""
    hbm_bandwidth: float = 3.35e12
    """Memory bandwidth, from the NVIDIA H100 SXM data sheet."""
    hbm_share: float = 0.8
    """Share of ``hbm_bandwidth`` that kernels reach which only move data."""
    sampling_passes: int = 6
    """Number of times that sampling reads or writes the float32 logits: product, copies and reductions."""
    sampling_kernels: int = 12
    host_s: float = 300e-6
    """Host time of each step that is not hidden behind the device: commit tokens, plan, lay out, launch."""
    launches: int = 0
    """Kernels of each layer that the host launches one by one. A step takes the longer of launching and computing."""
    stretch: float = 1.0
    """Factor on every part of a step."""
    layer_s: float = 0.0
    """Constant that is added for each layer of each step."""
    round_s: float = 50e-6
    """Time to launch one round of moves, with the new placement table."""
    migration_stretch: float = 1.0
    """Factor on the time of moves for which the engines wait."""
    network_bandwidth: float = 50e9
    """Bandwidth of each GPU between nodes: 400 Gb/s InfiniBand."""
    network_latency_s: float = 10e-6


GRAPH = Assumptions("measured kernels, as within CUDA graphs; small constants for the rest")
COST_SETS: dict[CostSet, Assumptions] = {
    "graph": GRAPH,
    "eager": replace(
        GRAPH,
        summary="the same, launched one by one at the measured cost of a launch",
        all_reduce_stack="vllm-0.24.0:vllm_eager",
        # norm, qkv, norm of queries, of keys, rope, cache write, attention, output, all-reduce, norm, router, choice,
        # alignment, product, activation, product, sum; all-gather, reduce-scatter.
        launches=19,
    ),
    "paper_like": replace(
        GRAPH,
        summary="graph, stretched so that the vLLM baseline takes the paper's 44 s at 4 requests/s",
        stretch=9.36,
        migration_stretch=9.74,
    ),
    "paper_like_fixed": replace(
        GRAPH,
        summary="graph and a constant for each layer, so that the vLLM baseline takes the paper's 44 s at 4 requests/s",
        layer_s=2.887e-3,
        migration_stretch=9.69,
    ),
}

PAPER_KV_TOKENS = 196_500
"""KV cache tokens per engine with which the ``paper_like`` baseline uses the paper's 26-27 % at 4 requests/s."""

DECISION_SECONDS: dict[PlacementPolicy, float] = {
    "gimbal": 7e-3,
    "gimbal_refined": 86e-3,
    "eplb": 6e-3,
    "eplb_hierarchical": 7e-3,
    "static": 0.0,
}
"""Seconds of ``scheduler.placement.propose`` for 48 layers, 128 experts, 2 sources and 4 ranks. Each is the least of 11
runs on one core of a virtual Intel Xeon. They are an order of magnitude, not times of the paper's machine."""
