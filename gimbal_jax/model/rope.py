"""Rotary position embedding, with the scalings of Qwen3-MoE checkpoints."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from gimbal_jax.config import ModelConfig, RopeConfig

Rotation = tuple[jax.Array, jax.Array]
"""float32 cosine and sine of the angle of each pair of dimensions, scaled, [..., 1, head_dim / 2] each."""


def rope_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Return the frequencies in radians per token, float32 [head_dim / 2], and the factor on sine and cosine.

    Source: Hugging Face ``modeling_rope_utils``, kinds default, linear, yarn and llama3.
    """
    rope, dim = config.rope, config.head_dim
    frequency = rope.theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    scale = 1.0
    match rope.kind:
        case "default":
            pass
        case "linear":
            frequency = frequency / rope.factor
        case "llama3":
            frequency = _llama3(frequency, rope, config.max_position)
        case "yarn":
            frequency, scale = _yarn(frequency, rope, dim, config.max_position)
    return frequency.astype(np.float32), scale


def _llama3(frequency: np.ndarray, rope: RopeConfig, max_position: int) -> np.ndarray:
    """Divide low frequencies by the factor, keep high ones, and blend linearly between them."""
    original = rope.original_max_position or max_position
    turns = original * frequency / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * frequency / rope.factor + blend * frequency


def _yarn(frequency: np.ndarray, rope: RopeConfig, dim: int, max_position: int) -> tuple[np.ndarray, float]:
    """Divide low frequencies by the factor, keep high ones, and scale sine and cosine (YaRN)."""
    original = rope.original_max_position or max_position

    def dim_that_turns(turns: float) -> float:
        """Return the pair of dimensions that makes this many turns over the original length."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_that_turns(rope.beta_fast), dim_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # Share of the divided frequency: 0 up to pair ``low``, 1 from pair ``high`` on.
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    scale = rope.attention_factor
    if scale is None and rope.mscale and rope.mscale_all_dim:
        scale = magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return frequency * (1 - ramp) + frequency / rope.factor * ramp, magnitude(1.0) if scale is None else scale


def rotation(config: ModelConfig, position: jax.Array) -> Rotation:
    """Compute the rotation of queries and keys at these positions [...], one time for all layers."""
    frequency, scale = rope_frequencies(config)
    angle = position[..., None, None].astype(jnp.float32) * frequency
    # Without the barrier, XLA fuses sine and cosine into every layer, and computes them there for each head.
    return jax.lax.optimization_barrier((jnp.cos(angle) * scale, jnp.sin(angle) * scale))


def apply_rope(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotate x [..., heads, head_dim], in float32. A pair is the dimensions (i, i + head_dim / 2)."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
