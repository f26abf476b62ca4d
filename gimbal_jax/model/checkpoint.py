"""Hugging Face safetensors, read tensor by tensor straight into their shards.

One table says where each parameter comes from: the published tensor name, and how
its axes are split and turned. Only one shard of one parameter is in host memory
at a time.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from gimbal_jax.config import ModelConfig

FLOAT_TYPES = {"F64", "F32", "F16", "BF16"}
Index = tuple[slice, ...]
Shape = tuple[int, ...]


class CheckpointError(ValueError):
    """A checkpoint that cannot be served, with the names of what is wrong."""


@dataclass(frozen=True)
class Source:
    """Where one parameter comes from: ``tensor.reshape(view).transpose(order)``.

    ``names`` holds one tensor, or for stacked experts the tensors of each expert in
    expert order, which are joined along the last axis.
    """

    names: tuple[tuple[str, ...], ...]
    shape: Shape
    """Of each tensor in the file."""
    view: Shape
    order: tuple[int, ...]
    stacked: bool = False


def _as_is(name: str, *shape: int) -> Source:
    return Source(((name,),), shape, shape, tuple(range(len(shape))))


def _bias(name: str, *axes: int) -> Source:
    return Source(((name,),), (math.prod(axes),), axes, tuple(range(len(axes))))


def _linear(name: str, out: tuple[int, ...], into: tuple[int, ...]) -> Source:
    """A linear layer: the file holds [out, in], the model [in, out], either side maybe split into heads."""
    order = (*range(len(out), len(out) + len(into)), *range(len(out)))
    return Source(((name,),), (math.prod(out), math.prod(into)), (*out, *into), order)


def source_of(path: tuple[Any, ...], c: ModelConfig) -> Source:
    """The source of the parameter at this path of ``Qwen3Moe``."""
    hidden, mlp, expert = (c.hidden_size,), (c.intermediate_size,), (c.moe_intermediate_size,)
    q, kv = (c.num_heads, c.head_dim), (c.num_kv_heads, c.head_dim)
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
        case ("attention", "o"):
            return _linear(attention + "o_proj.weight", hidden, q)
        case ("attention", "o_bias"):
            return _bias(attention + "o_proj.bias", *hidden)
        case ("attention", ("q" | "k" | "v") as part):
            return _linear(f"{attention}{part}_proj.weight", q if part == "q" else kv, hidden)
        case ("attention", str(bias)):
            return _bias(f"{attention}{bias[0]}_proj.bias", *(q if bias == "q_bias" else kv))
        case ("mlp", "router"):
            return _linear(block + "gate.weight", (c.num_experts,), hidden)
        case ("mlp", ("gate" | "up") as part):
            return _linear(f"{block}{part}_proj.weight", mlp, hidden)
        case ("mlp", "down") if path[1] not in c.moe_layers:
            return _linear(block + "down_proj.weight", hidden, mlp)
        case ("mlp", "down"):
            return _experts(block, c, ("down_proj",), _linear("", hidden, expert))
        case ("mlp", "gate_up"):
            return _experts(block, c, ("gate_proj", "up_proj"), _linear("", expert, hidden))
    raise KeyError(f"no source for parameter {path}")


def _experts(block: str, c: ModelConfig, parts: tuple[str, ...], each: Source) -> Source:
    names = (tuple(f"{block}experts.{e}.{part}.weight" for part in parts) for e in range(c.num_experts))
    return replace(each, names=tuple(names), stacked=True)


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
        index = folder / "model.safetensors.index.json"
        listed = _weight_map(index) if index.exists() else {}
        files = sorted(set(listed.values())) if index.exists() else ["model.safetensors"]
        self._file_of: dict[str, Any] = {}
        for name in files:
            try:
                file = safe_open(folder / name, framework="numpy")
            except FileNotFoundError as error:
                raise CheckpointError(f"{folder}: {name} is missing") from error
            except SafetensorError as error:
                raise CheckpointError(f"{folder / name} is damaged or truncated: {error}") from error
            except OSError as error:  # its text names no file
                raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
            self._file_of |= dict.fromkeys(file.keys(), file)
        if lost := sorted(set(listed) - set(self._file_of)):
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

    def read(self, name: str, rows: slice) -> np.ndarray:
        """Rows of a tensor."""
        return self._file_of[name].get_slice(name)[rows]


def read_shard(
    folder: SafetensorsFolder, source: Source, index: Index, dtype: Any, expert_of_slot: np.ndarray
) -> np.ndarray:
    """The part of a parameter that ``index`` selects."""
    if source.stacked:
        experts = expert_of_slot[index[0]]
        parts = (_read_joined(folder, source, source.names[e], index[1:], dtype) for e in experts)
        return _stack(parts, len(experts))
    return _read_joined(folder, source, source.names[0], index, dtype)


def _stack(parts: Iterator[np.ndarray], count: int) -> np.ndarray:
    first = next(parts)
    out = np.empty((count, *first.shape), first.dtype)
    out[0] = first
    for i, part in enumerate(parts, start=1):
        out[i] = part
    return out


def _read_joined(
    folder: SafetensorsFolder, source: Source, names: tuple[str, ...], index: Index, dtype: Any
) -> np.ndarray:
    view_index: list[slice] = [slice(None)] * len(source.view)
    for axis, part in zip(source.order, index, strict=True):
        view_index[axis] = part
    if len(names) > 1:  # the joined axis is never sharded
        view_index[source.order[-1]] = slice(None)
    first = range(source.view[0])[view_index[0]]
    per_row = source.shape[0] // source.view[0]
    rows = slice(first.start * per_row, first.stop * per_row)
    parts = []
    for name in names:
        tensor = folder.read(name, rows).reshape(len(first), *source.view[1:])
        parts.append(tensor[(slice(None), *view_index[1:])].transpose(source.order).astype(dtype, copy=False))
    return np.concatenate(parts, axis=-1) if len(parts) > 1 else np.ascontiguousarray(parts[0])


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
    sources = {path: source_of(path, config) for path, _ in flat}
    tensors.check({name: s.shape for s in sources.values() for names in s.names for name in names})
    expert_of_slot_LP = np.argsort(slot_of_expert_LE, axis=1)
    loaded = []
    for done, (path, variable) in enumerate(flat):
        source, target = sources[path], variable.get_value()
        moe_layer = config.moe_layers.index(path[1]) if source.stacked else 0
        read = partial(read_shard, tensors, source, dtype=target.dtype, expert_of_slot=expert_of_slot_LP[moe_layer])
        array = _to_devices(read, target)
        loaded.append((path, variable.replace(array)))
        progress(done + 1, len(flat))
    return nnx.from_flat_state(loaded)


def _to_devices(read: Callable[[Index], np.ndarray], target: jax.ShapeDtypeStruct) -> jax.Array:
    """An array from its shards, of which the host holds one at a time."""
    held: Index | None = None
    shard, arrays = None, []
    for device, index in target.sharding.addressable_devices_indices_map(target.shape).items():
        if index != held:
            shard = None
            gc.collect(0)  # until a collection, jax keeps the host's copy of what it has transferred
            held, shard = index, read(index)
        arrays.append(jax.block_until_ready(jax.device_put(shard, device)))
    return jax.make_array_from_single_device_arrays(target.shape, target.sharding, arrays)


def _weight_map(index: Path) -> dict[str, str]:
    """File of each tensor."""
    try:
        files = dict(json.loads(index.read_text("utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is no index of tensors: {error!r}") from error
    if wrong := [name for name, file in files.items() if not isinstance(file, str) or Path(file).name != file]:
        raise CheckpointError(f"{index} names no file of its folder for: {_some(wrong)}")
    return files


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
