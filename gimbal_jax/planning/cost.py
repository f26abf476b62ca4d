"""What a step costs on a mesh by the GPUs' data sheets: a floor, where nothing overlaps with links.

All figures are estimates for uniform routing and equally busy engines. Kernels reach less than the data sheet's
rates, and each collective has a latency that is not counted here; so plans compare, and times are lower bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from gimbal_jax.config import Exchange, MeshConfig, ModelConfig, PlacementConfig
from gimbal_jax.model.memory import kv_bytes_per_token, weight_bytes
from gimbal_jax.model.sizes import ITEM_BYTES, expert_bytes
from gimbal_jax.planning.gpus import Gpu


def remote_ranks(model: ModelConfig, ranks: int, form: Exchange) -> float:
    """Ranks other than its own that a token goes to: all of them, or those that hold one of its experts."""
    if form == "gather":
        return ranks - 1
    elsewhere = model.num_experts - model.num_experts // ranks
    return (ranks - 1) * (
        1 - comb(elsewhere, model.experts_per_token) / comb(model.num_experts, model.experts_per_token)
    )


def exchange_bytes(model: ModelConfig, ranks: int, form: Exchange) -> float:
    """Bytes over links for one token in one MoE layer: it goes out, and its results come back.

    With it go int32 places and weights of its experts; ``gather`` sends slots and positions for places.
    """
    numbers = {"gather": 3, "sparse": 2}[form] * model.experts_per_token
    return remote_ranks(model, ranks, form) * (2 * model.hidden_size * ITEM_BYTES[model.dtype] + 4 * numbers)


def tensor_parallel_bytes(model: ModelConfig, tp: int) -> int:
    """Bytes over links for one token in one layer within its engine.

    An all-reduce after attention (twice (tp - 1) copies) and an all-gather after the MoE layer, whose tokens
    are split over the engine's devices.
    """
    return 3 * (tp - 1) * model.hidden_size * ITEM_BYTES[model.dtype]


def link_seconds(model: ModelConfig, mesh: MeshConfig, gpu: Gpu, form: Exchange, tokens: int, chosen: int) -> float:
    """Time on the links for a step of this many tokens in all engines, of which ``chosen`` get logits."""
    per_token = len(model.moe_layers) * exchange_bytes(model, mesh.ranks, form)
    per_token += model.num_layers * tensor_parallel_bytes(model, mesh.tp)
    logits = chosen * (mesh.tp - 1) * model.vocab_size * 4
    return (tokens * per_token + logits) / mesh.ranks / gpu.link_bandwidth


def weights_read(model: ModelConfig, mesh: MeshConfig, tokens: int) -> float:
    """Bytes of weights that each device reads in a step of this many tokens: all but the experts that none chose."""
    weights = weight_bytes(model, mesh)
    idle = (1 - model.experts_per_token / model.num_experts) ** tokens
    return weights.total - weights.experts * idle


def decode_seconds(
    model: ModelConfig, mesh: MeshConfig, gpu: Gpu, form: Exchange, requests: int, context: int
) -> float:
    """Floor of a decode step: ``requests`` in all engines, each with ``context`` tokens in the cache."""
    cache = requests / mesh.dp * context * kv_bytes_per_token(model, mesh.tp)
    read = (weights_read(model, mesh, requests) + cache) / gpu.bandwidth
    return read + link_seconds(model, mesh, gpu, form, requests, requests)


def prefill_seconds(model: ModelConfig, mesh: MeshConfig, gpu: Gpu, form: Exchange, tokens: int, prompt: int) -> float:
    """Floor of a prefill step: ``tokens`` in all engines, of prompts of ``prompt`` tokens."""
    compute = tokens * flops_per_token(model, prompt / 2) / mesh.ranks / gpu.bf16_flops
    read = weights_read(model, mesh, tokens) / gpu.bandwidth
    return max(compute, read) + link_seconds(model, mesh, gpu, form, tokens, max(1, tokens // prompt))


def flops_per_token(model: ModelConfig, context: float) -> float:
    """Floating-point operations of one token's forward pass without logits, ``context`` tokens before it."""
    m = model
    per_layer = 4 * m.hidden_size * (m.num_heads + m.num_kv_heads) * m.head_dim + 4 * m.num_heads * m.head_dim * context
    moe = 6 * m.hidden_size * m.moe_intermediate_size * m.experts_per_token + 2 * m.hidden_size * m.num_experts
    dense = 6 * m.hidden_size * m.intermediate_size
    moe_layers = len(m.moe_layers)
    return m.num_layers * per_layer + moe_layers * moe + (m.num_layers - moe_layers) * dense


@dataclass(frozen=True)
class MigrationCost:
    """Moving experts between steps."""

    step_bytes: int
    """Most that moves between two steps, over all devices: rounds are whole, so the last one may pass the limit."""
    step_seconds: float
    """For that, with every link equally busy."""
    layer_steps: int
    """Steps in which one layer moves, if every GPU passes all its experts on to the next one."""
    layer_seconds: float
    """Time on the links for that: no placement takes more, since every link carries all experts of its GPU."""


def migration_cost(model: ModelConfig, ranks: int, gpu: Gpu, placement: PlacementConfig) -> MigrationCost:
    """What moving costs on ``ranks`` devices; nothing on one."""
    if ranks == 1:
        return MigrationCost(0, 0.0, 0, 0.0)
    expert, slots, rows = expert_bytes(model), model.num_experts // ranks, placement.rows_per_pair

    def rounds_per_step(round_bytes: int) -> int:
        return -(-placement.migrate_bytes_per_tick // round_bytes)

    full = ranks * (ranks - 1) * rows * expert
    step_bytes = rounds_per_step(full) * full
    layer_rounds = -(-slots // rows)
    return MigrationCost(
        step_bytes=step_bytes,
        step_seconds=step_bytes / ranks / gpu.link_bandwidth,
        layer_steps=-(-layer_rounds // rounds_per_step(ranks * min(rows, slots) * expert)),
        layer_seconds=slots * expert / gpu.link_bandwidth,
    )
