"""Hugging Face safetensors, read tensor by tensor straight into their shards.

One table says where each parameter comes from: the published tensors, how their axes
are split and turned, and how they are joined. Only one shard of one parameter is in host memory
at a time.
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
    """A checkpoint that cannot be served, with the names of what is wrong."""


@dataclass(frozen=True)
class Tensor:
    """A published tensor as a parameter holds it: ``tensor.reshape(view).transpose(order)``."""

    name: str
    shape: Shape
    """In the file."""
    view: Shape
    order: tuple[int, ...]
    copies: int = 1
    """How often each entry of the first axis of ``view`` stands in the parameter, one beside the other."""


@dataclass(frozen=True)
class Source:
    """Where one parameter comes from: tensors that are joined along an axis.

    ``tensors`` holds one such group, or for stacked experts that of each expert in expert order.
    """

    tensors: tuple[tuple[Tensor, ...], ...]
    join: int = 0
    """Axis of the group's result; not sharded if there is something to join."""
    stacked: bool = False


def _as_is(name: str, *shape: int) -> Source:
    return Source(((Tensor(name, shape, shape, tuple(range(len(shape)))),),))


def _linear(name: str, out: Shape, into: Shape = ()) -> Tensor:
    """A linear layer: the file holds [out, in], the model [in, out], either side maybe split. A bias has no ``in``."""
    order = (*range(len(out), len(out) + len(into)), *range(len(out)))
    return Tensor(name, tuple(math.prod(side) for side in (out, into) if side), (*out, *into), order)


def _qkv(attention: str, kind: str, c: ModelConfig, tp: int, into: Shape = ()) -> Source:
    """[in, KV heads, the query heads of each and its key and value, head size]."""
    groups = kv_heads_in_cache(c, tp)
    q = _linear(f"{attention}q_proj.{kind}", (groups, c.num_heads // groups, c.head_dim), into)
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
    """The source of the parameter at this path of ``Qwen3Moe``, for ``tp`` ranks in an engine."""
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
            parts = (_linear(f"{block}{part}_proj.weight", (*mlp, 1), hidden) for part in ("gate", "up"))
            return Source((tuple(replace(part, order=(2, 1, 0)) for part in parts),), join=1)
        case ("mlp", "down") if path[1] not in c.moe_layers:
            return Source(((_linear(block + "down_proj.weight", hidden, mlp),),))
        case ("mlp", "gate_up"):
            return _experts(block, c, ("gate", "up"), expert, hidden)
        case ("mlp", "down"):
            return _experts(block, c, ("down",), hidden, expert)
    raise KeyError(f"no source for parameter {path}")


def differences(found: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> list[str]:
    """What is missing, extra or wrongly shaped, by name."""
    wrong = []
    if missing := sorted(wanted.keys() - found.keys()):
        wrong.append(f"missing tensors: {_some(missing)}")
    if extra := sorted(found.keys() - wanted.keys()):
        wrong.append(f"tensors that this model has no place for: {_some(extra)}")
    for name in sorted(wanted.keys() & found.keys()):
        if found[name] != wanted[name]:
            wrong.append(f"{name} has shape {found[name]}, the configuration says {wanted[name]}")
    return wrong


class SafetensorsFolder:
    """The tensors of a folder: ``model.safetensors``, or shards with an index."""

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
            except OSError as error:  # its text names no file
                raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
            self._file_of |= dict.fromkeys(file.keys(), file)
        if lost := sorted(set(listed or ()) - set(self._file_of)):
            raise CheckpointError(f"{folder}: tensors that the index lists are in no file: {_some(lost)}")

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Refuse by name what is missing, extra, wrongly shaped or not a plain float."""
        tensors = {name: file.get_slice(name) for name, file in self._file_of.items()}
        wrong = differences({name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}, shapes)
        for name in sorted(shapes.keys() & tensors.keys()):
            if (stored := tensors[name].get_dtype()) not in FLOAT_TYPES:
                wrong.append(f"{name} has type {stored}; only {sorted(FLOAT_TYPES)} are read")
        if wrong:
            raise CheckpointError(f"{self._folder}: " + "; ".join(wrong[:10]))

    def types(self) -> set[str]:
        """Of all tensors, as safetensors calls them."""
        return {file.get_slice(name).get_dtype() for name, file in self._file_of.items()}

    def read(self, name: str, rows: slice) -> np.ndarray:
        """Rows of a tensor."""
        return self._file_of[name].get_slice(name)[rows]


def read_shard(
    folder: SafetensorsFolder, source: Source, shape: Shape, index: Index, dtype: Any, expert_of_slot: np.ndarray
) -> np.ndarray:
    """The part of a parameter of this shape that ``index`` selects."""
    if not source.stacked:
        parts = _read_parts(folder, source.tensors[0], source.join, index, dtype)
        return np.concatenate(parts, axis=source.join) if len(parts) > 1 else np.ascontiguousarray(parts[0])
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
    """What ``index`` selects of a tensor as the parameter holds it; of the file only the rows that it needs."""
    first, *others = (index[tensor.order.index(axis)] for axis in range(len(tensor.view)))
    entries = np.arange(tensor.view[0] * tensor.copies)[first] // tensor.copies
    rows, start = tensor.shape[0] // tensor.view[0], int(entries[0])
    found = folder.read(tensor.name, slice(start * rows, (int(entries[-1]) + 1) * rows))
    found = found.reshape(-1, *tensor.view[1:])[:, *others].astype(dtype, copy=False)
    return (found if tensor.copies == 1 else found[entries - start]).transpose(tensor.order)


def load_safetensors(
    folder: Path,
    config: ModelConfig,
    abstract: nnx.State,
    slot_of_expert_LE: np.ndarray,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> nnx.State:
    """Read a checkpoint into the shards that ``abstract`` describes.

    Args:
      folder: holds the safetensors.
      config: of the same checkpoint.
      abstract: from ``abstract_model``.
      slot_of_expert_LE: placement of the MoE layers; expert weights are put in slot order.
      progress: called with parameters done and in all.

    Raises:
      CheckpointError: names what is missing, extra, misshapen or truncated.
    """
    tensors = SafetensorsFolder(folder)
    flat = nnx.to_flat_state(abstract)
    tp = flat[0][1].get_value().sharding.mesh.shape["tp"]
    sources = {path: source_of(path, config, tp) for path, _ in flat}
    tensors.check({t.name: t.shape for source in sources.values() for group in source.tensors for t in group})
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
    """An array from the shards of this process's devices; the host reads each once, and holds one at a time."""
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
    """The safetensors files of a folder, in the order of their names; raises CheckpointError for a damaged index."""
    return [folder / name for name in _names(_listed(folder))]


def _names(listed: dict[str, str] | None) -> list[str]:
    return ["model.safetensors"] if listed is None else sorted(set(listed.values()))


def _listed(folder: Path) -> dict[str, str] | None:
    """File of each tensor by the folder's index, if it has one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return None
    try:
        files = dict(json.loads(index.read_text("utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is no index of tensors: {error!r}") from error
    if wrong := [name for name, file in files.items() if not isinstance(file, str) or Path(file).name != file]:
        raise CheckpointError(f"{index} names no file of its folder for: {_some(wrong)}")
    return files


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
