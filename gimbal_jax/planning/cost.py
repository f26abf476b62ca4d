"""Lower bounds of step times on a mesh, by the data sheets of the GPUs. Computing does not overlap with links.

All figures are estimates for uniform routing and equally busy engines. Kernels reach less than the data sheet's rates.
Collectives count only the latency that the maker of the network card gives, each time that nodes wait for each other.
So the times compare meshes and do not predict latencies.

Engines lie within nodes, so only the exchange and moving experts cross nodes. Traffic across nodes runs in parallel
with traffic within nodes, each GPU over its own share of the network, and the longer of the two counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import comb

from gimbal_jax.config import Exchange, MeshConfig, ModelConfig, PlacementConfig
from gimbal_jax.model.memory import kv_bytes_per_token, weight_bytes
from gimbal_jax.model.sizes import ITEM_BYTES, expert_bytes
from gimbal_jax.planning.hardware import Gpu, Link, link_kinds

WAITS: dict[Exchange, int] = {"gather": 2, "sparse": 3}
"""Number of waits between nodes in one MoE layer's exchange: for counts (``sparse``), tokens, and results."""


def remote_ranks(model: ModelConfig, ranks: int, form: Exchange) -> float:
    """Return the number of other ranks that a token goes to: all of them, or those that hold one of its experts."""
    if form == "gather":
        return ranks - 1
    return (ranks - 1) * _needed(model, ranks)


def far_copies(model: ModelConfig, ranks: int, nodes: int, form: Exchange) -> float:
    """Return the number of a token's copies that cross nodes.

    With ``gather`` there is one for each other node, and the GPUs there pass it on among themselves. With ``sparse``
    each rank gets its own, also ranks of the same node.
    """
    if form == "gather":
        return nodes - 1
    return (ranks - ranks // nodes) * _needed(model, ranks)


def _needed(model: ModelConfig, ranks: int) -> float:
    """Return the chance that a rank holds one of a token's experts."""
    elsewhere = model.num_experts - model.num_experts // ranks
    return 1 - comb(elsewhere, model.experts_per_token) / comb(model.num_experts, model.experts_per_token)


def exchange_bytes(model: ModelConfig, ranks: int, form: Exchange) -> float:
    """Return the bytes over links for one token in one MoE layer: the token goes out, and its results come back.

    The int32 places and weights of its experts go with it; ``gather`` sends slots and positions instead of places.
    """
    return remote_ranks(model, ranks, form) * _copy_bytes(model, form)


def far_exchange_bytes(model: ModelConfig, ranks: int, nodes: int, form: Exchange) -> float:
    """Return the part of ``exchange_bytes`` that crosses nodes."""
    return far_copies(model, ranks, nodes, form) * _copy_bytes(model, form)


def _copy_bytes(model: ModelConfig, form: Exchange) -> int:
    numbers = {"gather": 3, "sparse": 2}[form] * model.experts_per_token
    return 2 * model.hidden_size * ITEM_BYTES[model.dtype] + 4 * numbers


def tensor_parallel_bytes(model: ModelConfig, tp: int) -> int:
    """Return the bytes over links for one token in one layer within its engine.

    An all-reduce after attention (twice (tp - 1) copies) and an all-gather after the MoE layer, whose tokens
    are split over the engine's devices.
    """
    return 3 * (tp - 1) * model.hidden_size * ITEM_BYTES[model.dtype]


def link_seconds(
    model: ModelConfig, mesh: MeshConfig, gpu: Gpu, form: Exchange, tokens: int, chosen: int, link: Link | None = None
) -> float:
    """Return the seconds on the links for a step of ``tokens`` in all engines, of which ``chosen`` get logits.

    ``link`` is the network between the nodes; None for a mesh of one node.
    """
    layers = len(model.moe_layers)
    far = far_exchange_bytes(model, mesh.ranks, mesh.nodes, form)
    near = exchange_bytes(model, mesh.ranks, form) - far
    per_token = layers * near + model.num_layers * tensor_parallel_bytes(model, mesh.tp)
    logits = chosen * (mesh.tp - 1) * model.vocab_size * 4
    seconds = (tokens * per_token + logits) / mesh.ranks / gpu.link_bandwidth
    if mesh.nodes == 1:
        return seconds
    network = network_of(gpu, link)
    copies = tokens * layers / mesh.ranks
    longer = max(0.0, copies * far / network.bandwidth - copies * near / gpu.link_bandwidth)
    return seconds + longer + layers * WAITS[form] * network.latency_s


def network_of(gpu: Gpu, link: Link | None) -> Link:
    """Return the network, no faster than the GPU's own link, which may be PCIe. ValueError without a network."""
    if link is None:
        raise ValueError(f"link: several nodes need a network between them, one of {', '.join(link_kinds())}")
    return replace(link, bandwidth=min(link.bandwidth, gpu.link_bandwidth))


def weights_read(model: ModelConfig, mesh: MeshConfig, tokens: int) -> float:
    """Return the bytes of weights that each device reads in a step: all except experts that no token chose."""
    weights = weight_bytes(model, mesh)
    idle = (1 - model.experts_per_token / model.num_experts) ** tokens
    return weights.total - weights.experts * idle


def decode_seconds(
    model: ModelConfig,
    mesh: MeshConfig,
    gpu: Gpu,
    form: Exchange,
    requests: int,
    context: int,
    link: Link | None = None,
) -> float:
    """Return the floor of a decode step: ``requests`` in all engines, each with ``context`` tokens in the cache."""
    cache = requests / mesh.dp * context * kv_bytes_per_token(model, mesh.tp)
    read = (weights_read(model, mesh, requests) + cache) / gpu.bandwidth
    return read + link_seconds(model, mesh, gpu, form, requests, requests, link)


def prefill_seconds(
    model: ModelConfig, mesh: MeshConfig, gpu: Gpu, form: Exchange, tokens: int, prompt: int, link: Link | None = None
) -> float:
    """Return the floor of a prefill step: ``tokens`` in all engines, of prompts of ``prompt`` tokens."""
    compute = tokens * flops_per_token(model, prompt / 2) / mesh.ranks / gpu.bf16_flops
    read = weights_read(model, mesh, tokens) / gpu.bandwidth
    return max(compute, read) + link_seconds(model, mesh, gpu, form, tokens, max(1, tokens // prompt), link)


def flops_per_token(model: ModelConfig, context: float) -> float:
    """Return the operations of one token's forward pass without logits, with ``context`` tokens before it."""
    m = model
    per_layer = 4 * m.hidden_size * (m.num_heads + m.num_kv_heads) * m.head_dim + 4 * m.num_heads * m.head_dim * context
    moe = 6 * m.hidden_size * m.moe_intermediate_size * m.experts_per_token + 2 * m.hidden_size * m.num_experts
    dense = 6 * m.hidden_size * m.intermediate_size
    moe_layers = len(m.moe_layers)
    return m.num_layers * per_layer + moe_layers * moe + (m.num_layers - moe_layers) * dense


@dataclass(frozen=True)
class MigrationCost:
    """Cost of moving experts between steps."""

    step_bytes: int
    """Most bytes between two steps, over all devices. Rounds are whole, so the last one may exceed the limit.

    The buffers of a round have one size, so a round takes the same time for any number of moves."""
    far_step_bytes: int
    """Part of them that crosses nodes."""
    step_seconds: float
    """Time of those bytes, with every link equally busy."""
    layer_steps: int
    """Steps in which one layer moves, if every GPU passes all its experts on to the next one."""
    layer_seconds: float
    """Least time on the links for that layer, with full buffers: every link carries all experts of its GPU."""


def migration_cost(
    model: ModelConfig,
    ranks: int,
    gpu: Gpu,
    placement: PlacementConfig,
    nodes: int = 1,
    link: Link | None = None,
) -> MigrationCost:
    """Return the cost of moving on ``ranks`` devices, in ``nodes`` that ``link`` connects; zero on one device."""
    if ranks == 1:
        return MigrationCost(0, 0, 0.0, 0, 0.0)
    expert, slots, rows = expert_bytes(model), model.num_experts // ranks, placement.rows_per_pair

    def rounds_per_step(round_bytes: int) -> int:
        return -(-placement.migrate_bytes_per_tick // round_bytes)

    full = ranks * (ranks - 1) * rows * expert
    step_bytes = rounds_per_step(full) * full
    far_bytes = step_bytes // (ranks - 1) * (ranks - ranks // nodes)
    step_seconds = (step_bytes - far_bytes) / ranks / gpu.link_bandwidth
    layer_rounds = -(-slots // rows)
    layer_seconds = slots * expert / gpu.link_bandwidth
    if nodes > 1:
        network = network_of(gpu, link)
        step_seconds = max(step_seconds, far_bytes / ranks / network.bandwidth) + network.latency_s
        layer_seconds = slots * expert / network.bandwidth + network.latency_s
    return MigrationCost(
        step_bytes=step_bytes,
        far_step_bytes=far_bytes,
        step_seconds=step_seconds,
        layer_steps=-(-layer_rounds // rounds_per_step(ranks * min(rows, slots) * expert)),
        layer_seconds=layer_seconds,
    )
