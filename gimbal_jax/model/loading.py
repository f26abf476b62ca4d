"""Loading of a checkpoint folder, Hugging Face or Orbax, to weights on a mesh."""

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
    """Load weights into their shards, with the placement of their experts.

    An Orbax folder has the placement that was saved with it. A Hugging Face folder gets the contiguous placement.

    Args:
      folder: the checkpoint.
      config: configuration of the same checkpoint.
      mesh: (dp, tp).
      dtype: type of the weights on the devices.
      progress: called with the numbers of loaded parameters and of all parameters; not for Orbax.

    Returns:
      The weights, and slot_of_expert_LE of the MoE layers.

    Raises:
      CheckpointError: the checkpoint is damaged or does not fit the configuration.
    """
    _, abstract = abstract_model(config, dtype, mesh)
    if is_orbax(folder):
        return load_orbax(folder, config, abstract)
    contiguous_LE = np.tile(np.arange(config.num_experts, dtype=np.int32), (len(config.moe_layers), 1))
    return load_safetensors(folder, config, abstract, contiguous_LE, progress), contiguous_LE


def weights_dtype_on_cpu(folder: Path, dtype: str) -> str:
    """Return the type in which a CPU should hold the weights of a server that computes in ``dtype``.

    The result is bfloat16 for float32 steps if the checkpoint is stored in bfloat16 and the CPU multiplies bfloat16.
    Then the weights are exact and the products faster. Otherwise the result is ``dtype``.

    Raises:
      CheckpointError: the folder cannot be read.
    """
    if dtype != "float32" or not _multiplies_bfloat16():
        return dtype
    stored = orbax_types(folder) if is_orbax(folder) else SafetensorsFolder(folder).types()
    return "bfloat16" if stored <= {"BF16", "bfloat16"} else dtype


def _multiplies_bfloat16() -> bool:
    """Return whether this CPU has instructions that multiply bfloat16."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(_cpu_flags().split())


def _cpu_flags() -> str:
    """Return the CPU's feature flags; empty if the system does not list them."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
