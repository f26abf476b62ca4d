"""A checkpoint folder of either kind to weights on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from gimbal_jax.config import ModelConfig
from gimbal_jax.model.checkpoint import load_safetensors
from gimbal_jax.model.orbax_checkpoint import is_orbax, load_orbax
from gimbal_jax.model.step import abstract_model


def load_weights(
    folder: Path,
    config: ModelConfig,
    mesh: jax.sharding.Mesh,
    dtype: Any,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[nnx.State, np.ndarray]:
    """Weights in their shards, and the placement that their experts stand in.

    An Orbax folder brings the placement that was saved with it; a Hugging Face
    folder starts from the contiguous one. Raises CheckpointError.
    """
    _, abstract = abstract_model(config, dtype, mesh)
    if is_orbax(folder):
        return load_orbax(folder, config, abstract)
    contiguous_LE = np.tile(np.arange(config.num_experts, dtype=np.int32), (len(config.moe_layers), 1))
    return load_safetensors(folder, config, abstract, contiguous_LE, progress), contiguous_LE
