"""Orbax checkpoints: weights in slot order, with the placement that the order follows.

They restore straight into any mesh that the model fits, whatever mesh they were saved from.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from gimbal_jax.config import ModelConfig
from gimbal_jax.model.checkpoint import CheckpointError

WEIGHTS = "weights"
COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)
"""What a Hugging Face folder holds besides weights, and an Orbax folder too."""


def is_orbax(folder: Path) -> bool:
    """Whether this folder was written by ``save_orbax``."""
    return (folder / WEIGHTS).is_dir()


def save_orbax(folder: Path, source: Path, weights: nnx.State, slot_of_expert_LE: np.ndarray) -> None:
    """Write an Orbax checkpoint, complete with configuration and tokenizer copied from ``source``.

    Raises CheckpointError if the folder holds one already.
    """
    if is_orbax(folder):
        raise CheckpointError(f"{folder} already holds a checkpoint; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / WEIGHTS).absolute(), _tree(weights, slot_of_expert_LE))
    for name in COPIED:
        if (source / name).exists() and source.resolve() != folder.resolve():
            shutil.copy(source / name, folder / name)


def load_orbax(folder: Path, config: ModelConfig, abstract: nnx.State) -> tuple[nnx.State, np.ndarray]:
    """Weights in the shards that ``abstract`` describes, and slot_of_expert_LE.

    Raises CheckpointError, naming what does not fit the configuration.
    """
    replicated = jax.sharding.NamedSharding(_mesh_of(abstract), jax.sharding.PartitionSpec())
    shape = (len(config.moe_layers), config.num_experts)
    slots = jax.ShapeDtypeStruct(shape, np.int32, sharding=replicated)
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            tree = checkpointer.restore((folder / WEIGHTS).absolute(), _tree(abstract, slots))
        except (ValueError, KeyError, FileNotFoundError) as error:
            raise CheckpointError(f"{folder}: {error}") from error
    weights = nnx.from_flat_state(
        [(path, variable.replace(tree[_key(path)])) for path, variable in nnx.to_flat_state(abstract)]
    )
    return weights, np.asarray(tree["slot_of_expert"])


def _key(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _tree(state: nnx.State, slot_of_expert_LE: object) -> dict[str, object]:
    values = {_key(path): variable.get_value() for path, variable in nnx.to_flat_state(state)}
    return values | {"slot_of_expert": slot_of_expert_LE}


def _mesh_of(abstract: nnx.State) -> jax.sharding.Mesh:
    return jax.tree.leaves(abstract)[0].sharding.mesh
