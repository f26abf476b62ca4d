"""Sets of assumptions about everything that no kernel table holds.

The constants of ``paper_like`` and ``paper_like_fixed`` were found by ``python -m research.cost_report --fit``, for the
vLLM baseline alone: see ``simulation.fit``. None is fitted to what gimbal gains. They are the two extremes: with
the first all that a step computes is slower, with the second every step has the same more to bear.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from gimbal_jax.config import PlacementPolicy

CostSet = Literal["graph", "eager", "paper_like", "paper_like_fixed"]


@dataclass(frozen=True)
class Assumptions:
    """One set. Kernel times are the table's in all of them. Times in seconds, rates in bytes per second."""

    summary: str
    all_reduce_stack: str = "vllm-0.24.0:vllm_graph"
    small_kernels: int = 8
    """Of each layer, in no table: two norms with residuals, norms of queries and of keys, rope, places of pairs, sum
    over copies, and counting. The cache write is in the table's attention, the choice of experts in its MoE layer."""
    small_kernel_s: float = 2e-6
    """Least time of such a kernel within a CUDA graph. The table shows none below 4.2 us, for an all-reduce."""
    hbm_bandwidth: float = 3.35e12
    """NVIDIA H100 SXM data sheet."""
    hbm_share: float = 0.8
    """Of it, what kernels that only move data reach."""
    sampling_passes: int = 6
    """Times that float32 logits are read or written: product, copies and reductions (see ``model.memory``)."""
    sampling_kernels: int = 12
    host_s: float = 300e-6
    """Of each step, what is not hidden behind the device: commit tokens, plan, lay out, launch."""
    launches: int = 0
    """Kernels of each layer that the host launches one by one. It runs ahead: a step takes the longer of the two."""
    stretch: float = 1.0
    """Factor on every part of a step."""
    layer_s: float = 0.0
    """Constant on top, for each layer of each step."""
    round_s: float = 50e-6
    """Launching one round of moves, with the new table."""
    migration_stretch: float = 1.0
    """Factor on the time that moving experts takes while the engines wait."""
    network_bandwidth: float = 50e9
    """Between nodes, for each GPU: 400 Gb/s InfiniBand."""
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
"""KV cache of an engine with which the baseline uses the paper's 26-27 % of it at 4 requests/s (``paper_like``)."""

DECISION_SECONDS: dict[PlacementPolicy, float] = {
    "gimbal": 7e-3,
    "gimbal_refined": 86e-3,
    "eplb": 6e-3,
    "eplb_hierarchical": 7e-3,
    "static": 0.0,
}
"""``scheduler.placement.propose`` for 48 layers, 128 experts, 2 sources and 4 ranks, the least of 11 runs on one core
of a virtual Intel Xeon: an order of magnitude, not the paper's machine."""
