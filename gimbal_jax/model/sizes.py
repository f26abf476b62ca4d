"""Bytes that follow from a model's configuration alone; without jax, for the simulator."""

from __future__ import annotations

from gimbal_jax.config import ModelConfig

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of one number, by dtype."""


def expert_bytes(model: ModelConfig) -> int:
    """Weights of one expert of one layer: gate, up and down."""
    return 3 * model.hidden_size * model.moe_intermediate_size * ITEM_BYTES[model.weights_dtype]
