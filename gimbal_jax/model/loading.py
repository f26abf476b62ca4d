"""A checkpoint folder of either kind to weights on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from gimbal_jax.config import ModelConfig
from gimbal_jax.model.checkpoint import SafetensorsFolder, load_safetensors
from gimbal_jax.model.orbax_checkpoint import is_orbax, load_orbax, orbax_types
from gimbal_jax.model.step import abstract_model


def load_weights(
    folder: Path,
    config: ModelConfig,
    mesh: jax.sharding.Mesh,
    dtype: Any,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[nnx.State, np.ndarray]:
    """Weights of this type in their shards, and the placement that their experts stand in.

    An Orbax folder brings the placement that was saved with it; a Hugging Face
    folder starts from the contiguous one. Raises CheckpointError.
    """
    _, abstract = abstract_model(config, dtype, mesh)
    if is_orbax(folder):
        return load_orbax(folder, config, abstract)
    contiguous_LE = np.tile(np.arange(config.num_experts, dtype=np.int32), (len(config.moe_layers), 1))
    return load_safetensors(folder, config, abstract, contiguous_LE, progress), contiguous_LE


def weights_dtype_on_cpu(folder: Path, dtype: str) -> str:
    """The type to keep weights in for steps in ``dtype``: bfloat16 where they lose nothing and are faster.

    Raises CheckpointError for a folder that cannot be read.
    """
    if dtype != "float32" or not _multiplies_bfloat16():
        return dtype
    stored = orbax_types(folder) if is_orbax(folder) else SafetensorsFolder(folder).types()
    return "bfloat16" if stored <= {"BF16", "bfloat16"} else dtype


def _multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(_cpu_flags().split())


def _cpu_flags() -> str:
    """Empty where the system does not say."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
