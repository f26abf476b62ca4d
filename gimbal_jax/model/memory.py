"""Bytes that a mesh needs on each of its devices, by arithmetic; no memory is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from gimbal_jax.config import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_IDS,
    EngineConfig,
    MeshConfig,
    ModelConfig,
    ServerConfig,
)
from gimbal_jax.model.inputs import group_sizes
from gimbal_jax.model.sharding import kv_heads_in_cache
from gimbal_jax.model.sizes import ITEM_BYTES, expert_bytes
from gimbal_jax.pallas_kernels import Backend
from gimbal_jax.pallas_kernels.grouped_matmul import slots_bytes, temporary_bytes
from gimbal_jax.pallas_kernels.paged_attention import BLOCK

SAMPLING_COPIES = 7
"""Arrays of the size of the logits that exist together while sampling. They are the logits, four more that XLA
allocates for H100, and two of scratch memory for the sort on the device. XLA reports 5.01 times the logits as
temporaries of a decode step. Log probabilities of prompts have no more places in one block, and need as much."""
SPLIT_ROWS = 264 * 128
"""Rows of float32 partial results if blocks of the attention kernel share a context: at most 264 blocks of 2 * 64
rows."""
GB = 1e9
"""Bytes of a GB in texts."""


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of the weights on one device."""

    experts: int
    """Experts of this device's slots."""
    attention: int
    """Attention, and the norms of the layers, which every device holds."""
    router: int
    """Routers, which every device holds."""
    dense: int
    """Feed-forward networks of the layers without experts."""
    vocabulary: int
    """Embedding, output head and the last norm."""

    @property
    def total(self) -> int:
        return self.experts + self.attention + self.router + self.dense + self.vocabulary


@dataclass(frozen=True)
class StepBytes:
    """Bytes of temporary memory that one step needs on one device; an upper estimate."""

    activations: int
    """Hidden states that exist during a whole layer, and embeddings before they are added up."""
    attention: int
    """Queries, keys, values and outputs, with float32 copies and partial results."""
    feed_forward: int
    """Tokens of all engines with the outputs of the experts here, or the activations of the dense layers."""
    logits: int
    """float32 logits of every group, or of a block of prompt tokens, with the arrays of sampling."""

    @property
    def total(self) -> int:
        """Peak of the step. Attention, feed-forward and logits do not exist at the same time."""
        return self.activations + max(self.attention, self.feed_forward, self.logits)


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes on one device: a fixed part, and KV pages in the rest."""

    weights: WeightBytes
    """Weights."""
    migration: int
    """Buffers of ``move_experts``; 0 if no experts move."""
    step: StepBytes
    """Temporary memory of the largest step."""
    tables: int
    """Counters, placement, page tables and rare inputs, both blank ones and those of a step that uses all."""
    page: int
    """One KV page: keys and values of this device's heads in all layers."""
    least_pages: int
    """Pages of one sequence of the greatest length, without which an engine cannot serve."""

    @property
    def fixed(self) -> int:
        """Everything but KV pages."""
        return self.weights.total + self.migration + self.step.total + self.tables

    @property
    def least(self) -> int:
        """Least memory with which the mesh can serve."""
        return self.fixed + self.least_pages * self.page

    def kv_pages(self, budget: int) -> int:
        """Return the KV pages of an engine if each of its devices may use ``budget`` bytes.

        Raises ValueError if they are fewer than ``least_pages``.
        """
        if budget < self.least:
            raise ValueError(
                f"each device may use {budget / GB:.1f} GB, and needs {self.least / GB:.1f} GB: "
                f"{self.weights.total / GB:.1f} for weights, {self.step.total / GB:.1f} for a step, "
                f"{(self.migration + self.tables) / GB:.1f} for migration and tables, "
                f"{self.least_pages * self.page / GB:.1f} for one sequence of the greatest length"
            )
        return (budget - self.fixed) // self.page


def device_bytes(
    model: ModelConfig,
    config: ServerConfig,
    bucket: tuple[int, int],
    backend: Backend = "mosaic",
    *,
    start_placement: bool = False,
) -> DeviceBytes:
    """Return the bytes that a server with these settings needs on each device.

    Args:
      model: the architecture.
      config: settings with a mesh that passes ``check_mesh``; ``engine.num_pages`` has no effect.
      bucket: (decode rows, prefill tiles) of the largest step.
      backend: which form of the kernels the devices run.
      start_placement: whether experts move to a given placement before serving. They do so under ``static`` too.
    """
    engine, mesh = config.engine, config.mesh
    moves = start_placement or config.placement.policy != "static"
    _, groups = group_sizes(*bucket, engine.tile)
    layers_and_experts = len(model.moe_layers) * model.num_experts
    # Old counts, new counts and placement; then page tables and last tokens. All are int32.
    tables = 4 * (3 * layers_and_experts + groups * engine.pages_per_row + engine.max_rows)
    tables += 2 * rare_bytes(model.vocab_size, engine)
    return DeviceBytes(
        weights=weight_bytes(model, mesh),
        migration=migration_bytes(model, mesh, config.placement.rows_per_pair) if moves else 0,
        step=step_bytes(model, mesh, engine, bucket, backend),
        tables=tables,
        page=engine.page_size * kv_bytes_per_token(model, mesh.tp),
        least_pages=engine.pages_per_row,
    )


def weight_bytes(model: ModelConfig, mesh: MeshConfig) -> WeightBytes:
    """Return the weights on each device, exactly the bytes of the shards of ``abstract_model``."""
    m, tp, item = model, mesh.tp, ITEM_BYTES[model.weights_dtype]
    heads = m.num_heads // tp * m.head_dim
    kv = kv_heads_in_cache(m, tp) // tp * m.head_dim
    biases = heads + 2 * kv + m.hidden_size if m.attention_bias else 0
    norms = 2 * m.hidden_size + 2 * m.head_dim
    attention = 2 * m.hidden_size * (heads + kv) + biases + norms
    moe, dense = len(m.moe_layers), m.num_layers - len(m.moe_layers)
    tables = 1 if m.tie_embeddings else 2
    return WeightBytes(
        experts=moe * (m.num_experts // mesh.ranks) * expert_bytes(m),
        attention=m.num_layers * attention * item,
        router=moe * m.hidden_size * m.num_experts * item,
        dense=dense * 3 * m.hidden_size * (m.intermediate_size // tp) * item,
        vocabulary=(tables * m.vocab_size // tp + 1) * m.hidden_size * item,
    )


def kv_bytes_per_token(model: ModelConfig, tp: int = 1) -> int:
    """Return the bytes of one token's keys and values in all layers, on each of an engine's ``tp`` devices.

    If there are more devices than KV heads, each device has a copy of one head.
    """
    heads = kv_heads_in_cache(model, tp) // tp
    return 2 * model.num_layers * heads * model.head_dim * ITEM_BYTES[model.dtype]


def migration_bytes(model: ModelConfig, mesh: MeshConfig, rows_per_pair: int) -> int:
    """Return the buffers of ``move_experts`` on each device: the rows that it sends, and as many received ones."""
    return 2 * mesh.ranks * rows_per_pair * expert_bytes(model)


def rare_bytes(vocab_size: int, engine: EngineConfig) -> int:
    """Return the bytes of one engine's ``RareInputs``, without the scalars."""
    settings = 4  # prompt tokens and three penalties
    per_row = settings + MAX_STOP_IDS + 2 * MAX_LOGIT_BIAS + -(-vocab_size // 32) + engine.max_model_len
    return 4 * (engine.max_rows * per_row + -(-engine.token_budget // engine.tile) * engine.tile)


def step_bytes(
    model: ModelConfig, mesh: MeshConfig, engine: EngineConfig, bucket: tuple[int, int], backend: Backend
) -> StepBytes:
    """Return the temporary memory of a step of this (decode rows, prefill tiles); see ``StepBytes``."""
    m, item = model, ITEM_BYTES[model.dtype]
    tokens, groups = group_sizes(*bucket, engine.tile)
    prompt_places = bucket[1] * engine.tile
    heads = m.num_heads // mesh.tp
    kv_heads = kv_heads_in_cache(m, mesh.tp) // mesh.tp
    received, slots = mesh.dp * tokens, m.num_experts // mesh.ranks  # a rank may receive the tokens of all engines
    routed = received, m.experts_per_token, slots, m.hidden_size, m.moe_intermediate_size, mesh.ranks
    if backend == "xla":
        # Scores, their exponentials and values of a block of context.
        partial = (3 * tokens * heads + groups * kv_heads * m.head_dim) * max(BLOCK, engine.page_size) * 4
        experts = slots_bytes(*routed, item, ITEM_BYTES[m.weights_dtype])
    else:
        partial = SPLIT_ROWS * m.head_dim * 4
        experts = temporary_bytes(*routed)
    dense = 3 * tokens * m.intermediate_size // mesh.tp * item if len(m.moe_layers) < m.num_layers else 0
    return StepBytes(
        activations=tokens * m.hidden_size * (3 * item + 4),
        attention=tokens * m.head_dim * (2 * (heads + kv_heads) * item + 2 * heads * 4) + partial,
        feed_forward=max(experts + 2 * received * m.hidden_size * item, dense),
        logits=SAMPLING_COPIES * groups * m.vocab_size * 4 + 2 * prompt_places * (MAX_LOGPROBS + 1) * 8,
    )
