"""Hugging Face safetensors, read tensor by tensor straight into their shards.

``source_of`` is the one table from parameters to published tensors. It gives the tensors of a parameter, how their axes
are split and transposed, and how they are joined. The host holds only one shard of one parameter at a time.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from gimbal_jax.config import ModelConfig
from gimbal_jax.model.sharding import kv_heads_in_cache

FLOAT_TYPES = {"F64", "F32", "F16", "BF16"}
Index = tuple[slice, ...]
Shape = tuple[int, ...]


class CheckpointError(ValueError):
    """A checkpoint that cannot be served. The text names the folder, file or tensors that are wrong."""


@dataclass(frozen=True)
class Tensor:
    """A published tensor as a parameter holds it: ``tensor.reshape(view).transpose(order)``."""

    name: str
    shape: Shape
    """Shape in the file."""
    view: Shape
    """Shape with the file's axes split."""
    order: tuple[int, ...]
    """Axes of ``view`` in the order of the parameter's axes."""
    copies: int = 1
    """How often the parameter repeats each entry of the first axis of ``view``; copies are adjacent."""


@dataclass(frozen=True)
class Source:
    """The tensors that one parameter is read from."""

    tensors: tuple[tuple[Tensor, ...], ...]
    """Groups of tensors to join: one group, or one per expert in expert order if ``stacked``."""
    join: int = 0
    """Axis along which a group's tensors are joined; not sharded if a group has several tensors."""
    stacked: bool = False
    """Whether the groups are stacked along a new first axis, the slots of the experts."""


def _as_is(name: str, *shape: int) -> Source:
    return Source(((Tensor(name, shape, shape, tuple(range(len(shape)))),),))


def _linear(name: str, out: Shape, into: Shape = ()) -> Tensor:
    """Return a linear layer: [out, in] in the file, [in, out] in the model, each may be split. A bias has no in."""
    order = (*range(len(out), len(out) + len(into)), *range(len(out)))
    return Tensor(name, tuple(math.prod(side) for side in (out, into) if side), (*out, *into), order)


def _qkv(attention: str, kind: str, c: ModelConfig, tp: int, into: Shape = ()) -> Source:
    """Return the joined projection [in, KV heads, query heads of each + its key + its value, head size]."""
    groups = kv_heads_in_cache(c, tp)
    q = _linear(f"{attention}q_proj.{kind}", (groups, c.num_heads // groups, c.head_dim), into)
    # With more ranks than KV heads, each rank gets a copy of one key and one value head.
    k, v = (
        replace(
            _linear(f"{attention}{part}_proj.{kind}", (c.num_kv_heads, 1, c.head_dim), into),
            copies=groups // c.num_kv_heads,
        )
        for part in "kv"
    )
    return Source(((q, k, v),), join=len(into) + 1)


def _experts(block: str, c: ModelConfig, parts: tuple[str, ...], out: Shape, into: Shape) -> Source:
    experts = (
        tuple(_linear(f"{block}experts.{e}.{part}_proj.weight", out, into) for part in parts)
        for e in range(c.num_experts)
    )
    return Source(tuple(experts), join=1, stacked=True)


def source_of(path: tuple[Any, ...], c: ModelConfig, tp: int) -> Source:
    """Return the source of a parameter.

    Args:
      path: of the parameter in ``Qwen3Moe``, as ``nnx.to_flat_state`` gives it.
      c: the model's configuration.
      tp: ranks of an engine.

    Raises:
      KeyError: the model has no such parameter.
    """
    hidden, mlp, expert = (c.hidden_size,), (c.intermediate_size,), (c.moe_intermediate_size,)
    if path[0] != "layers":
        return {
            "embed": _as_is("model.embed_tokens.weight", c.vocab_size, c.hidden_size),
            "norm": _as_is("model.norm.weight", c.hidden_size),
            "head": _as_is("lm_head.weight", c.vocab_size, c.hidden_size),
        }[str(path[0])]

    layer = f"model.layers.{path[1]}."
    attention, block = layer + "self_attn.", layer + "mlp."
    match path[2:]:
        case ("input_norm", "scale"):
            return _as_is(layer + "input_layernorm.weight", *hidden)
        case ("post_norm", "scale"):
            return _as_is(layer + "post_attention_layernorm.weight", *hidden)
        case ("attention", ("q_norm" | "k_norm") as norm, "scale"):
            return _as_is(f"{attention}{norm}.weight", c.head_dim)
        case ("attention", "qkv"):
            return _qkv(attention, "weight", c, tp, hidden)
        case ("attention", "qkv_bias"):
            return _qkv(attention, "bias", c, tp)
        case ("attention", "o"):
            return Source(((_linear(attention + "o_proj.weight", hidden, (c.num_heads, c.head_dim)),),))
        case ("attention", "o_bias"):
            return _as_is(attention + "o_proj.bias", *hidden)
        case ("mlp", "router"):
            return Source(((_linear(block + "gate.weight", (c.num_experts,), hidden),),))
        case ("mlp", "gate_up") if path[1] not in c.moe_layers:
            # The model's order is [in, gate or up, out].
            parts = (_linear(f"{block}{part}_proj.weight", (*mlp, 1), hidden) for part in ("gate", "up"))
            return Source((tuple(replace(part, order=(2, 1, 0)) for part in parts),), join=1)
        case ("mlp", "down") if path[1] not in c.moe_layers:
            return Source(((_linear(block + "down_proj.weight", hidden, mlp),),))
        case ("mlp", "gate_up"):
            return _experts(block, c, ("gate", "up"), expert, hidden)
        case ("mlp", "down"):
            return _experts(block, c, ("down",), hidden, expert)
    raise KeyError(f"no source for parameter {path}")


def differences(stored: Mapping[str, Shape], expected: Mapping[str, Shape]) -> list[str]:
    """Return one text for the missing tensors, one for the extra ones, and one per tensor of the wrong shape."""
    wrong = []
    if missing := sorted(expected.keys() - stored.keys()):
        wrong.append(f"missing tensors: {_some(missing)}")
    if extra := sorted(stored.keys() - expected.keys()):
        wrong.append(f"tensors that this model has no place for: {_some(extra)}")
    for name in sorted(expected.keys() & stored.keys()):
        if stored[name] != expected[name]:
            wrong.append(f"{name} has shape {stored[name]}, the configuration requires {expected[name]}")
    return wrong


class SafetensorsFolder:
    """The tensors of a folder: ``model.safetensors``, or several files with an index.

    Raises CheckpointError for a file that is missing, damaged or unreadable, and for indexed tensors in no file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        listed = _listed(folder)
        self._file_of: dict[str, Any] = {}
        for name in _names(listed):
            try:
                file = safe_open(folder / name, framework="numpy")
            except FileNotFoundError as error:
                raise CheckpointError(f"{folder}: {name} is missing") from error
            except SafetensorError as error:
                raise CheckpointError(f"{folder / name} is damaged or truncated: {error}") from error
            except OSError as error:  # the text of an OSError names no file here
                raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
            self._file_of |= dict.fromkeys(file.keys(), file)
        if lost := sorted(set(listed or ()) - set(self._file_of)):
            raise CheckpointError(f"{folder}: tensors that the index lists are in no file: {_some(lost)}")

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise CheckpointError if the folder does not hold exactly tensors of these names and shapes, as plain floats.

        The text names the first ten faults.
        """
        # Slices read only the header of a file.
        tensors = {name: file.get_slice(name) for name, file in self._file_of.items()}
        wrong = differences({name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}, shapes)
        for name in sorted(shapes.keys() & tensors.keys()):
            if (stored := tensors[name].get_dtype()) not in FLOAT_TYPES:
                wrong.append(f"{name} has type {stored}; only {sorted(FLOAT_TYPES)} are read")
        if wrong:
            raise CheckpointError(f"{self._folder}: " + "; ".join(wrong[:10]))

    def types(self) -> set[str]:
        """Return the types of all tensors in the names of safetensors, such as BF16."""
        return {file.get_slice(name).get_dtype() for name, file in self._file_of.items()}

    def read(self, name: str, rows: slice) -> np.ndarray:
        """Return these entries of a tensor's first axis."""
        return self._file_of[name].get_slice(name)[rows]


def read_shard(
    folder: SafetensorsFolder, source: Source, shape: Shape, index: Index, dtype: Any, expert_of_slot: np.ndarray
) -> np.ndarray:
    """Return one shard of a parameter.

    Args:
      folder: the tensors.
      source: of the parameter.
      shape: of the whole parameter.
      index: the shard, one slice for each axis.
      dtype: type of the result.
      expert_of_slot: [E] expert of each slot of the parameter's layer; used for stacked sources only.
    """
    if not source.stacked:
        parts = _read_parts(folder, source.tensors[0], source.join, index, dtype)
        return np.concatenate(parts, axis=source.join) if len(parts) > 1 else np.ascontiguousarray(parts[0])
    # Experts are written into the shard one after the other, so that the host never holds a second copy of it.
    shard = np.empty([len(range(size)[part]) for size, part in zip(shape, index, strict=True)], dtype)
    for place, expert in zip(shard, expert_of_slot[index[0]], strict=True):
        parts = _read_parts(folder, source.tensors[expert], source.join, index[1:], dtype)
        np.concatenate(parts, axis=source.join, out=place)
    return shard


def _read_parts(
    folder: SafetensorsFolder, tensors: tuple[Tensor, ...], join: int, index: Index, dtype: Any
) -> list[np.ndarray]:
    if len(tensors) > 1:
        index = (*index[:join], slice(None), *index[join + 1 :])
    return [_read(folder, tensor, index, dtype) for tensor in tensors]


def _read(folder: SafetensorsFolder, tensor: Tensor, index: Index, dtype: Any) -> np.ndarray:
    """Return the part of a tensor that ``index`` selects in the parameter's axes. Only the needed rows are read."""
    # ``index`` is in the parameter's axes: bring it into the order of the view's axes.
    first, *others = (index[tensor.order.index(axis)] for axis in range(len(tensor.view)))
    # Entries of the view's first axis that are wanted, repeated for copies; each is ``rows`` rows of the file.
    entries = np.arange(tensor.view[0] * tensor.copies)[first] // tensor.copies
    rows, start = tensor.shape[0] // tensor.view[0], int(entries[0])
    values = folder.read(tensor.name, slice(start * rows, (int(entries[-1]) + 1) * rows))
    values = values.reshape(-1, *tensor.view[1:])[:, *others].astype(dtype, copy=False)
    return (values if tensor.copies == 1 else values[entries - start]).transpose(tensor.order)


def load_safetensors(
    folder: Path,
    config: ModelConfig,
    abstract: nnx.State,
    slot_of_expert_LE: np.ndarray,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> nnx.State:
    """Read a checkpoint into the shards that ``abstract`` describes.

    Args:
      folder: the folder of the safetensors files.
      config: configuration of the same checkpoint.
      abstract: from ``abstract_model``.
      slot_of_expert_LE: placement of the MoE layers; expert weights are stored in slot order.
      progress: called after each parameter with the numbers of loaded parameters and of all parameters.

    Raises:
      CheckpointError: tensors are missing, extra or of the wrong shape, or a file is damaged; the text names them.
    """
    tensors = SafetensorsFolder(folder)
    flat = nnx.to_flat_state(abstract)
    tp = flat[0][1].get_value().sharding.mesh.shape["tp"]
    sources = {path: source_of(path, config, tp) for path, _ in flat}
    tensors.check({t.name: t.shape for source in sources.values() for group in source.tensors for t in group})
    # The inverse of each layer's permutation.
    expert_of_slot_LP = np.argsort(slot_of_expert_LE, axis=1)
    loaded = []
    for done, (path, variable) in enumerate(flat):
        source, target = sources[path], variable.get_value()
        moe_layer = config.moe_layers.index(path[1]) if source.stacked else 0
        read = partial(read_shard, tensors, source, target.shape)
        array = _to_devices(partial(read, dtype=target.dtype, expert_of_slot=expert_of_slot_LP[moe_layer]), target)
        loaded.append((path, variable.replace(array)))
        progress(done + 1, len(flat))
    return nnx.from_flat_state(loaded)


def _to_devices(read: Callable[[Index], np.ndarray], target: jax.ShapeDtypeStruct) -> jax.Array:
    """Make an array from this process's shards. The host reads each distinct shard once, and holds one at a time."""
    # Devices that hold the same shard, in replicated arrays, share one read.
    devices_of: dict[Index, list[jax.Device]] = {}
    for device, index in target.sharding.addressable_devices_indices_map(target.shape).items():
        devices_of.setdefault(index, []).append(device)
    arrays = []
    for index, devices in devices_of.items():
        shard = read(index)
        arrays += [jax.block_until_ready(jax.device_put(shard, device)) for device in devices]
        del shard
        gc.collect(0)  # until a collection, jax keeps the host's copy of what it has transferred
    return jax.make_array_from_single_device_arrays(target.shape, target.sharding, arrays)


def weight_files(folder: Path) -> list[Path]:
    """Return a folder's safetensors files in the order of their names. Raise CheckpointError for a damaged index."""
    return [folder / name for name in _names(_listed(folder))]


def _names(listed: dict[str, str] | None) -> list[str]:
    return ["model.safetensors"] if listed is None else sorted(set(listed.values()))


def _listed(folder: Path) -> dict[str, str] | None:
    """Return the file of each tensor as the folder's index lists it; None without an index."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return None
    try:
        files = dict(json.loads(index.read_text("utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is not an index of tensors: {error!r}") from error
    if wrong := [name for name, file in files.items() if not isinstance(file, str) or Path(file).name != file]:
        raise CheckpointError(f"{index} does not name a file of its folder for: {_some(wrong)}")
    return files


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
