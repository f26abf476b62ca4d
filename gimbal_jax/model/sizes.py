"""Sizes in bytes that depend only on a model's configuration. No jax is imported, for the simulator."""

from __future__ import annotations

from gimbal_jax.config import ModelConfig

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of one number, by dtype."""


def expert_bytes(model: ModelConfig) -> int:
    """Return the bytes of one expert's weights in one layer: gate, up and down."""
    return 3 * model.hidden_size * model.moe_intermediate_size * ITEM_BYTES[model.weights_dtype]
