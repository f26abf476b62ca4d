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
from gimbal_jax.model.checkpoint import CheckpointError, differences
from gimbal_jax.model.hf_config import SIDE_FILES

WEIGHTS = "weights"


def is_orbax(folder: Path) -> bool:
    """Whether this folder was written by ``save_orbax``."""
    return (folder / WEIGHTS).is_dir()


def check_target(folder: Path) -> None:
    """Raise CheckpointError if ``save_orbax`` cannot write here."""
    if is_orbax(folder):
        raise CheckpointError(f"{folder} already holds a checkpoint; choose another folder")
    if "[" in str(folder.absolute()):  # Orbax takes it for a pattern and loses what it has written
        raise CheckpointError(f"{folder}: Orbax cannot write below a folder with [ in its name")


def save_orbax(folder: Path, source: Path, weights: nnx.State, slot_of_expert_LE: np.ndarray) -> None:
    """Write an Orbax checkpoint, complete with configuration and tokenizer copied from ``source``.

    Raises CheckpointError as ``check_target`` does.
    """
    check_target(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / WEIGHTS).absolute(), _tree(weights, slot_of_expert_LE))
    for name in SIDE_FILES:
        if (source / name).exists() and source.resolve() != folder.resolve():
            shutil.copy(source / name, folder / name)


def load_orbax(folder: Path, config: ModelConfig, abstract: nnx.State) -> tuple[nnx.State, np.ndarray]:
    """Weights in the shards that ``abstract`` describes, and slot_of_expert_LE.

    Raises CheckpointError, naming what does not fit the configuration.
    """
    replicated = jax.sharding.NamedSharding(_mesh_of(abstract), jax.sharding.PartitionSpec())
    shape = (len(config.moe_layers), config.num_experts)
    slots = jax.ShapeDtypeStruct(shape, np.int32, sharding=replicated)
    wanted, path = _tree(abstract, slots), (folder / WEIGHTS).absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(path).item_metadata
        if metadata is None:
            raise CheckpointError(f"{folder} cannot be restored: it has no Orbax metadata")
        stored = {name: tuple(array.shape) for name, array in metadata.tree.items()}
        if wrong := differences(stored, {name: array.shape for name, array in wanted.items()}):
            raise CheckpointError(f"{folder}: " + "; ".join(wrong[:10]))
        try:
            tree = checkpointer.restore(path, wanted)
        except Exception as error:  # of damaged data, Orbax raises no narrower type
            reason, *_ = str(error).split("\n")
            raise CheckpointError(f"{folder} cannot be restored: {reason}") from error
    weights = nnx.from_flat_state(
        [(at, variable.replace(tree[_key(at)])) for at, variable in nnx.to_flat_state(abstract)]
    )
    return weights, np.asarray(tree["slot_of_expert"])


def _key(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _tree(state: nnx.State, slot_of_expert_LE: Any) -> dict[str, Any]:
    values = {_key(path): variable.get_value() for path, variable in nnx.to_flat_state(state)}
    return values | {"slot_of_expert": slot_of_expert_LE}


def _mesh_of(abstract: nnx.State) -> jax.sharding.Mesh:
    return jax.tree.leaves(abstract)[0].sharding.mesh
