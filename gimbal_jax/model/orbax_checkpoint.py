"""Orbax checkpoints: weights in slot order, with the placement that the order follows.

They restore straight into any mesh that the model fits, whatever mesh they were saved from. Where a mesh spans
processes, each writes and reads its own shards, and all of them save and restore together.
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
SLOTS = "slot_of_expert"
FORMAT = 2
"""Of what ``save_orbax`` writes. The first, which had no number, held q, k and v apart, and gate and up."""


def is_orbax(folder: Path) -> bool:
    """Whether this folder was written by ``save_orbax``."""
    return (folder / WEIGHTS).is_dir()


def check_target(folder: Path) -> None:
    """Raise CheckpointError if ``save_orbax`` cannot write here."""
    if is_orbax(folder):
        raise CheckpointError(f"{folder} already holds a checkpoint; choose another folder")
    if "[" in str(folder.absolute()):  # Orbax takes it for a pattern and loses what it has written
        raise CheckpointError(f"{folder}: Orbax cannot write below a folder with [ in its name")


def check_shared_target(folder: Path) -> None:
    """Raise CheckpointError or OSError in every process if one of them cannot write here, or not where others do.

    All processes call it together. Where there are several it makes the folder.
    """
    if jax.process_count() == 1:
        return check_target(folder)
    marks = [folder / f".process-{process}" for process in range(jax.process_count())]
    own = marks[jax.process_index()]

    def mark() -> None:
        check_target(folder)
        folder.mkdir(parents=True, exist_ok=True)
        own.touch()

    def see_the_others() -> None:
        if unseen := [process for process, path in enumerate(marks) if not path.exists()]:
            raise CheckpointError(f"{folder}: what process {unseen[0]} writes is not seen here; all must share it")

    try:
        _together(mark)
        _together(see_the_others)
    finally:
        if own.exists():
            own.unlink()


def save_orbax(folder: Path, source: Path, weights: nnx.State, slot_of_expert_LE: np.ndarray) -> None:
    """Write an Orbax checkpoint, complete with configuration and tokenizer copied from ``source``.

    All processes of the weights' mesh call it together, with one folder that they share. Raises as
    ``check_shared_target`` does.
    """
    import orbax.checkpoint as ocp  # a tenth of all imports, which other checkpoints do without

    check_shared_target(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0:  # before the weights: with them the checkpoint is complete
        for name in SIDE_FILES:
            if (source / name).exists() and source.resolve() != folder.resolve():
                shutil.copy(source / name, folder / name)
    tree = _tree(weights, slot_of_expert_LE)
    kv_heads = tree["layers.0.attention.qkv"].shape[1]
    with ocp.StandardCheckpointer() as checkpointer:
        about = {"format": FORMAT, "kv_heads": kv_heads}
        checkpointer.save((folder / WEIGHTS).absolute(), tree, custom_metadata=about)


def load_orbax(folder: Path, config: ModelConfig, abstract: nnx.State) -> tuple[nnx.State, np.ndarray]:
    """Weights in the shards that ``abstract`` describes, and slot_of_expert_LE.

    Raises CheckpointError, naming what does not fit the configuration.
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
        if (found := about.get("format", 1)) != FORMAT:
            raise CheckpointError(
                f"{folder} holds a checkpoint of format {found}, and only format {FORMAT} can be restored: "
                "convert the original again, with gimbal convert"
            )
        saved = jax.tree.map(partial(_as_saved, about["kv_heads"], config), abstract, is_leaf=_is_variable)
        wanted = _tree(saved, slots)
        stored = {name: tuple(array.shape) for name, array in metadata.item_metadata.tree.items()}
        if wrong := differences(stored, {name: array.shape for name, array in wanted.items()}):
            raise CheckpointError(f"{folder}: " + "; ".join(wrong[:10]))
        try:
            tree = checkpointer.restore(path, wanted)
        except Exception as error:  # of damaged data, Orbax raises no narrower type
            reason, *_ = str(error).split("\n")
            raise CheckpointError(f"{folder} cannot be restored: {reason}") from error
    weights = nnx.from_flat_state(
        [
            (at, variable.replace(_on_mesh(tree.pop(_key(at)), variable.get_value(), config.num_kv_heads)))
            for at, variable in nnx.to_flat_state(abstract)
        ]
    )
    return weights, np.asarray(tree[SLOTS])


def orbax_types(folder: Path) -> set[str]:
    """Of all weights."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata((folder / WEIGHTS).absolute()).item_metadata
    arrays = {} if metadata is None else metadata.tree
    return {str(array.dtype) for name, array in arrays.items() if name != SLOTS}


def regroup(qkv: jax.Array, kv_heads: int) -> jax.Array:
    """``Attention.qkv`` or its bias for so many KV heads, copies or not: one number must divide the other."""
    had = qkv.shape[-3]
    q, kv = qkv[..., :-2, :], qkv[..., -2:, :]
    q = q.reshape(*qkv.shape[:-3], kv_heads, -1, qkv.shape[-1])
    kv = jnp.repeat(kv, kv_heads // had, axis=-3) if kv_heads > had else kv[..., :: had // kv_heads, :, :]
    return jnp.concatenate([q, kv], axis=-2)


def _as_saved(kv_heads: int, config: ModelConfig, variable: nnx.Variable) -> nnx.Variable:
    """A parameter for so many KV heads, as well as this mesh can split it."""
    axes, value = variable.get_metadata("axes"), variable.get_value()
    if "group" not in axes:
        return variable
    shape = (*value.shape[:-3], kv_heads, config.num_heads // kv_heads + 2, config.head_dim)
    sharding = sharding_for(axes, shape, value.sharding.mesh)
    return variable.replace(jax.ShapeDtypeStruct(shape, value.dtype, sharding=sharding))


def _on_mesh(array: jax.Array, wanted: jax.ShapeDtypeStruct, kv_heads: int) -> jax.Array:
    """As this mesh needs it, by way of the model's own KV heads."""
    if array.shape == wanted.shape:
        return array
    return jax.jit(lambda x: regroup(regroup(x, kv_heads), wanted.shape[-3]), out_shardings=wanted.sharding)(array)


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
        raise CheckpointError(f"process {failed[0]} cannot write the checkpoint; it says why")


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _key(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _tree(state: nnx.State, slot_of_expert_LE: Any) -> dict[str, Any]:
    values = {_key(path): variable.get_value() for path, variable in nnx.to_flat_state(state)}
    return values | {SLOTS: slot_of_expert_LE}


def _mesh_of(abstract: nnx.State) -> jax.sharding.Mesh:
    return jax.tree.leaves(abstract)[0].sharding.mesh
