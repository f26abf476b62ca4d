"""Shapes that kernels were measured for, and how their times carry over to the shapes of another model.

Rules, nothing fitted: a kernel is as efficient at another shape as at the measured one, so its time is in proportion to
the bytes and FLOP of that shape. A product's go with columns times depth, decode attention's with KV heads, prefill
attention's with query heads, an expert's with its weights, and what is done with a token with the hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from gimbal_jax.config import MeshConfig, ModelConfig
from gimbal_jax.simulation.expert_kernel import CHOICES, EXPERTS

MEASURED = "Qwen3-30B-A3B"
"""The model whose kernels were measured."""
HIDDEN, EXPERT_WIDTH, HEAD_DIM = 2048, 768, 128
TP, QUERY_HEADS, KV_HEADS = 2, 16, 2
"""Attention and its projections: of one rank."""
QKV_COLUMNS = (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM
HEAD_COLUMNS = 65536
"""The widest product measured; the output head's time is in proportion to its columns."""
REQUIRED = {"num_experts": EXPERTS, "experts_per_token": CHOICES, "head_dim": HEAD_DIM, "dtype": "bfloat16"}
"""What no rule carries over."""
DERIVED = frozenset({"qkv_and_output", "router", "head", "decode_attention", "prefill_attention"})
"""Kernels that have a shape of the model's; collectives go by bytes alone."""


@dataclass(frozen=True)
class Shares:
    """A rank's work in each kernel over that of the measured shape, for as many tokens or rows."""

    qkv: float
    output: float
    depth: float
    """Of the router and of the head's columns; also of what a token's bytes cost beside the expert products."""
    kv_heads: float
    query_heads: float
    expert: float
    """Weights of an expert: its bytes, and the FLOP of each of its pairs."""


def shares(model: ModelConfig, tp: int) -> Shares:
    """Of a rank of ``tp``; with more ranks than KV heads each holds a whole one."""
    query_heads, kv_heads = model.num_heads / tp, max(model.num_kv_heads / tp, 1)
    depth = model.hidden_size / HIDDEN
    columns = (query_heads + 2 * kv_heads) * HEAD_DIM
    return Shares(
        qkv=columns / QKV_COLUMNS * depth,
        output=query_heads / QUERY_HEADS * depth,
        depth=depth,
        kv_heads=kv_heads / KV_HEADS,
        query_heads=query_heads / QUERY_HEADS,
        expert=depth * model.moe_intermediate_size / EXPERT_WIDTH,
    )


def is_measured(model: ModelConfig) -> bool:
    """Whether the kernels were measured for this model's layers, however many."""
    wide = model.hidden_size, model.moe_intermediate_size, model.num_heads, model.num_kv_heads
    return wide == (HIDDEN, EXPERT_WIDTH, TP * QUERY_HEADS, TP * KV_HEADS)


def check_shapes(model: ModelConfig, mesh: MeshConfig) -> None:
    """ValueError unless there is a price for every layer, and engines lie within nodes."""
    for name, required in REQUIRED.items():
        if getattr(model, name) != required:
            raise ValueError(f"{name} {getattr(model, name)}: H100 kernels were measured for {required} only")
    if len(model.moe_layers) != model.num_layers:
        raise ValueError("moe_layers: H100 kernels were measured for models whose layers all have experts")
    if mesh.tp not in (1, 2, 4):
        raise ValueError(f"tp {mesh.tp}: H100 attention was measured at tp 2, and scales to 1, 2 and 4 only")
    if mesh.nodes < 1 or mesh.ranks % mesh.nodes or mesh.ranks_per_node % mesh.tp:
        raise ValueError(f"nodes {mesh.nodes}: must split {mesh.dp} engines of {mesh.tp} GPUs evenly, each on one node")
