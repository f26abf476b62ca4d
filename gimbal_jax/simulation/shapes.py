"""Shapes for which kernels were measured, and rules that scale their times to the shapes of another model.

Nothing is fitted. A kernel is assumed to be as efficient at another shape as at the measured one, so its time is
proportional to the bytes and FLOP of the shape. A product scales with columns times depth. Decode attention scales
with KV heads, and prefill attention with query heads. An expert scales with its weights, and the handling of a token
with the hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from gimbal_jax.config import MeshConfig, ModelConfig
from gimbal_jax.simulation.expert_kernel import CHOICES, EXPERTS

MEASURED = "Qwen3-30B-A3B"
"""The model whose kernels were measured."""
HIDDEN, EXPERT_WIDTH, HEAD_DIM = 2048, 768, 128
TP, QUERY_HEADS, KV_HEADS = 2, 16, 2
"""Measured shapes of attention and its projections, on one rank."""
QKV_COLUMNS = (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM
HEAD_COLUMNS = 65536
"""Columns of the widest measured product. The time of the output head is proportional to its columns."""
REQUIRED = {"num_experts": EXPERTS, "experts_per_token": CHOICES, "head_dim": HEAD_DIM, "dtype": "bfloat16"}
"""Fields that a model must share with the measured one, because no rule scales them."""
DERIVED = frozenset({"qkv_and_output", "router", "head", "decode_attention", "prefill_attention"})
"""Kernels whose times depend on shapes of the model. Collectives depend on bytes alone."""


@dataclass(frozen=True)
class Shares:
    """Work of a rank in each kernel, relative to the measured shape with equally many tokens or rows."""

    qkv: float
    output: float
    depth: float
    """Share of the router and of each column of the head. Also the share of the bytes of a token in ``handling``."""
    kv_heads: float
    query_heads: float
    expert: float
    """Share of an expert's weights, which stands for its bytes and for the FLOP of each of its pairs."""


def shares(model: ModelConfig, tp: int) -> Shares:
    """Return the shares of one of ``tp`` ranks. A rank holds at least one whole KV head."""
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
    """Return whether the kernels were measured for layers of this model's shape. The number of layers may differ."""
    wide = model.hidden_size, model.moe_intermediate_size, model.num_heads, model.num_kv_heads
    return wide == (HIDDEN, EXPERT_WIDTH, TP * QUERY_HEADS, TP * KV_HEADS)


def unpriced_fields(model: ModelConfig) -> list[str]:
    """Return an error for each field that no rule scales and that differs from the measured model."""
    return [
        f"{name} {getattr(model, name)}: H100 kernels were measured for {required} only"
        for name, required in REQUIRED.items()
        if getattr(model, name) != required
    ]


def check_shapes(model: ModelConfig, mesh: MeshConfig) -> None:
    """Raise ValueError unless every layer has a price and every engine lies within one node."""
    if errors := unpriced_fields(model):
        raise ValueError(errors[0])
    if len(model.moe_layers) != model.num_layers:
        raise ValueError("moe_layers: H100 kernels were measured for models whose layers all have experts")
    if mesh.tp not in (1, 2, 4):
        raise ValueError(f"tp {mesh.tp}: H100 attention was measured at tp 2, and scales to 1, 2 and 4 only")
    if mesh.nodes < 1 or mesh.ranks % mesh.nodes or mesh.ranks_per_node % mesh.tp:
        raise ValueError(f"nodes {mesh.nodes}: must split {mesh.dp} engines of {mesh.tp} GPUs evenly, each on one node")
