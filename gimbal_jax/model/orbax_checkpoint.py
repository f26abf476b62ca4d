"""Orbax checkpoints: weights in slot order, with the placement that defines the order.

A checkpoint restores directly into any mesh that the model fits, independent of the mesh that saved it. If a mesh spans
several processes, each of them writes and reads its own shards, and all of them save and restore together.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from gimbal_jax.config import ModelConfig
from gimbal_jax.model.checkpoint import CheckpointError, differences
from gimbal_jax.model.hf_config import SIDE_FILES
from gimbal_jax.model.sharding import sharding_for

WEIGHTS = "weights"
"""Folder of the arrays, inside the checkpoint folder."""
SLOTS = "slot_of_expert"
"""Name of the placement among the arrays."""
FORMAT = 2
"""Format that ``save_orbax`` writes. Format 1 had no number, and held q, k, v, gate and up as separate arrays."""


def is_orbax(folder: Path) -> bool:
    """Return whether this folder was written by ``save_orbax``."""
    return (folder / WEIGHTS).is_dir()


def check_target(folder: Path) -> None:
    """Raise CheckpointError if ``save_orbax`` cannot write here."""
    if is_orbax(folder):
        raise CheckpointError(f"{folder} already holds a checkpoint; choose another folder")
    if "[" in str(folder.absolute()):  # Orbax treats it as a pattern and loses the data that it has written
        raise CheckpointError(f"{folder}: Orbax cannot write below a folder with [ in its name")


def check_shared_target(folder: Path) -> None:
    """Check that all processes can write to this folder and that it is one shared folder.

    All processes must call it together. It creates the folder if there are several processes.

    Raises:
      CheckpointError, OSError: a process cannot write, or the folder is not shared. All processes raise.
    """
    if jax.process_count() == 1:
        return check_target(folder)
    # Each process creates a file, then looks for the files of the others.
    marks = [folder / f".process-{process}" for process in range(jax.process_count())]
    own = marks[jax.process_index()]

    def mark() -> None:
        check_target(folder)
        folder.mkdir(parents=True, exist_ok=True)
        own.touch()

    def see_the_others() -> None:
        if unseen := [process for process, path in enumerate(marks) if not path.exists()]:
            raise CheckpointError(f"{folder}: files of process {unseen[0]} are not visible here; all must share it")

    try:
        _together(mark)
        _together(see_the_others)
    finally:
        if own.exists():
            own.unlink()


def save_orbax(folder: Path, source: Path, weights: nnx.State, slot_of_expert_LE: np.ndarray) -> None:
    """Write an Orbax checkpoint with configuration and tokenizer.

    All processes of the weights' mesh must call it together.

    Args:
      folder: the new checkpoint, in a file system that the processes share.
      source: checkpoint folder to copy configuration and tokenizer from.
      weights: weights in slot order.
      slot_of_expert_LE: placement that defines the slot order.

    Raises:
      CheckpointError, OSError: see ``check_shared_target``.
    """
    import orbax.checkpoint as ocp  # here: it takes a tenth of the import time, and only Orbax needs it

    check_shared_target(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # The weights come last: a folder with weights counts as a complete checkpoint.
    if jax.process_index() == 0:
        for name in SIDE_FILES:
            if (source / name).exists() and source.resolve() != folder.resolve():
                shutil.copy(source / name, folder / name)
    tree = _tree(weights, slot_of_expert_LE)
    kv_heads = tree["layers.0.attention.qkv"].shape[1]
    with ocp.StandardCheckpointer() as checkpointer:
        about = {"format": FORMAT, "kv_heads": kv_heads}
        checkpointer.save((folder / WEIGHTS).absolute(), tree, custom_metadata=about)


def load_orbax(folder: Path, config: ModelConfig, abstract: nnx.State) -> tuple[nnx.State, np.ndarray]:
    """Restore the weights into the shards that ``abstract`` describes.

    Args:
      folder: the checkpoint.
      config: configuration of the same checkpoint.
      abstract: from ``abstract_model``.

    Returns:
      The weights, and slot_of_expert_LE.

    Raises:
      CheckpointError: the checkpoint is damaged, of another format, or does not fit the configuration; the text names
        the arrays that do not fit.
    """
    import orbax.checkpoint as ocp

    replicated = jax.sharding.NamedSharding(_mesh_of(abstract), jax.sharding.PartitionSpec())
    shape = (len(config.moe_layers), config.num_experts)
    slots = jax.ShapeDtypeStruct(shape, np.int32, sharding=replicated)
    path = (folder / WEIGHTS).absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(path)
        if metadata.item_metadata is None:
            raise CheckpointError(f"{folder} cannot be restored: it has no Orbax metadata")
        about = metadata.custom_metadata or {}
        if (saved_format := about.get("format", 1)) != FORMAT:
            raise CheckpointError(
                f"{folder} holds a checkpoint of format {saved_format}, and only format {FORMAT} can be restored: "
                "convert the original again, with gimbal convert"
            )
        # The checkpoint may have been saved for another number of KV heads than this mesh needs.
        saved = jax.tree.map(partial(_as_saved, about["kv_heads"], config), abstract, is_leaf=_is_variable)
        target = _tree(saved, slots)
        stored = {name: tuple(array.shape) for name, array in metadata.item_metadata.tree.items()}
        if wrong := differences(stored, {name: array.shape for name, array in target.items()}):
            raise CheckpointError(f"{folder}: " + "; ".join(wrong[:10]))
        try:
            tree = checkpointer.restore(path, target)
        except Exception as error:  # Orbax raises no narrower type for damaged data
            reason, *_ = str(error).split("\n")
            raise CheckpointError(f"{folder} cannot be restored: {reason}") from error
    # Each restored array is freed as soon as it has been regrouped.
    weights = nnx.from_flat_state(
        [
            (at, variable.replace(_on_mesh(tree.pop(_key(at)), variable.get_value(), config.num_kv_heads)))
            for at, variable in nnx.to_flat_state(abstract)
        ]
    )
    return weights, np.asarray(tree[SLOTS])


def orbax_types(folder: Path) -> set[str]:
    """Return the types of all weights, in jax's names."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata((folder / WEIGHTS).absolute()).item_metadata
    arrays = {} if metadata is None else metadata.tree
    return {str(array.dtype) for name, array in arrays.items() if name != SLOTS}


def regroup(qkv: jax.Array, kv_heads: int) -> jax.Array:
    """Return ``Attention.qkv`` or its bias for another number of KV heads.

    More heads are copies of the old ones; fewer heads drop copies. One of the two numbers must divide the other.

    Args:
      qkv: [..., KV heads, query heads of each + 2, head size].
      kv_heads: KV heads of the result.
    """
    old_heads = qkv.shape[-3]
    q, kv = qkv[..., :-2, :], qkv[..., -2:, :]
    q = q.reshape(*qkv.shape[:-3], kv_heads, -1, qkv.shape[-1])
    if kv_heads > old_heads:
        kv = jnp.repeat(kv, kv_heads // old_heads, axis=-3)
    else:
        kv = kv[..., :: old_heads // kv_heads, :, :]
    return jnp.concatenate([q, kv], axis=-2)


def _as_saved(kv_heads: int, config: ModelConfig, variable: nnx.Variable) -> nnx.Variable:
    """Return the shape of a parameter for this number of KV heads, split as far as this mesh can."""
    axes, value = variable.get_metadata("axes"), variable.get_value()
    if "group" not in axes:
        return variable
    shape = (*value.shape[:-3], kv_heads, config.num_heads // kv_heads + 2, config.head_dim)
    sharding = sharding_for(axes, shape, value.sharding.mesh)
    return variable.replace(jax.ShapeDtypeStruct(shape, value.dtype, sharding=sharding))


def _on_mesh(array: jax.Array, target: jax.ShapeDtypeStruct, kv_heads: int) -> jax.Array:
    """Return a restored parameter with the number of KV heads that this mesh needs."""
    if array.shape == target.shape:
        return array
    # Neither number of copies need divide the other, but the model's own KV heads divide both.
    return jax.jit(lambda x: regroup(regroup(x, kv_heads), target.shape[-3]), out_shardings=target.sharding)(array)


def _together(check: Callable[[], None]) -> None:
    """Run a check in every process, and raise in all of them if it fails in one."""
    failure: CheckpointError | OSError | None = None
    try:
        check()
    except (CheckpointError, OSError) as error:
        failure = error
    (failed,) = multihost_utils.process_allgather(np.array(failure is not None)).nonzero()
    if failure is not None:
        raise failure
    if failed.size:
        raise CheckpointError(f"process {failed[0]} cannot write the checkpoint; its own error gives the reason")


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _key(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _tree(state: nnx.State, slot_of_expert_LE: Any) -> dict[str, Any]:
    """Return all arrays of a checkpoint by name."""
    values = {_key(path): variable.get_value() for path, variable in nnx.to_flat_state(state)}
    return values | {SLOTS: slot_of_expert_LE}


def _mesh_of(abstract: nnx.State) -> jax.sharding.Mesh:
    return jax.tree.leaves(abstract)[0].sharding.mesh
