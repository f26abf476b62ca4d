"""Traffic windows and placements as .npz files: written by servers, read by ``gimbal place``, simulators and you.

A file holds ``counts`` [W, L, S, E], ``slot_of_expert`` [W, L, E] (in force while each window was
counted) and ``meta`` (JSON text, with the number of ranks); from an offline profile also
``transitions`` [L-1, E, E] and ``request_counts`` [N, L, E]. A placement file has no counts.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gimbal_jax.config import MeshConfig, ModelConfig


class CountsFileError(ValueError):
    """A file that is not what it should be; the message names the file and what is wrong."""


@dataclass(frozen=True, eq=False)
class CountsFile:
    """The windows of one file. Axes: W windows, L MoE layers, S sources, E experts, N requests."""

    counts_WLSE: np.ndarray
    slot_of_expert_WLE: np.ndarray
    meta: dict[str, Any]
    transitions_LEE: np.ndarray | None = None
    request_counts_NLE: np.ndarray | None = None

    @property
    def ranks(self) -> int:
        return int(self.meta["ranks"])


def save_counts(
    path: Path,
    counts: np.ndarray,
    slot_of_expert: np.ndarray,
    meta: Mapping[str, Any],
    *,
    transitions_LEE: np.ndarray | None = None,
    request_counts_NLE: np.ndarray | None = None,
) -> None:
    """Write windows [W, L, S, E] with their placements [W, L, E], or one window [L, S, E] with its own [L, E].

    ``meta`` is what JSON can hold, with ``ranks``. The file appears when it is complete.
    Raises CountsFileError for arrays that ``load_counts`` would refuse, and OSError.
    """
    counts, slot_of_expert = np.asarray(counts), np.asarray(slot_of_expert)
    arrays = {
        "counts": counts[None] if counts.ndim == 3 else counts,
        "slot_of_expert": slot_of_expert[None] if slot_of_expert.ndim == 2 else slot_of_expert,
        "transitions": transitions_LEE,
        "request_counts": request_counts_NLE,
    }
    _write(path, {name: array for name, array in arrays.items() if array is not None}, meta, _check_counts)


def load_counts(path: Path) -> CountsFile:
    """Read a counts file. Raises CountsFileError, or OSError where it cannot be read."""
    arrays, meta = _read(path)
    _check_counts(path, arrays, meta)
    return CountsFile(
        arrays["counts"].astype(np.int64),
        arrays["slot_of_expert"].astype(np.int32),
        meta,
        arrays.get("transitions"),
        arrays.get("request_counts"),
    )


def save_placement(path: Path, slot_of_expert_LE: np.ndarray, meta: Mapping[str, Any]) -> None:
    """Write a placement for ``gimbal serve --placement-file``; ``meta`` as in ``save_counts``."""
    _write(path, {"slot_of_expert": np.asarray(slot_of_expert_LE)[None]}, meta, _check_placement)


def load_placement(path: Path) -> tuple[np.ndarray, int]:
    """slot_of_expert_LE and ranks of a placement file, or of a counts file's last window. Errors as ``load_counts``."""
    arrays, meta = _read(path)
    _check_placement(path, arrays, meta)
    return arrays["slot_of_expert"][-1].astype(np.int32), int(meta["ranks"])


def load_placement_of(path: Path, model: ModelConfig, mesh: MeshConfig) -> np.ndarray:
    """``load_placement``'s slot_of_expert_LE; CountsFileError also if it is of another model's or mesh's shape."""
    slot_of_expert_LE, ranks = load_placement(path)
    shape = len(model.moe_layers), model.num_experts
    if slot_of_expert_LE.shape != shape or ranks != mesh.ranks:
        (layers, experts), found = shape, slot_of_expert_LE.shape
        wanted = f"{layers} layers of {experts} experts on {mesh.ranks} ranks"
        raise CountsFileError(
            f"{path}: its placement is of {found[0]} layers of {found[1]} experts on {ranks} ranks, not {wanted}"
        )
    return slot_of_expert_LE


def _write(path: Path, arrays: dict[str, np.ndarray], meta: Mapping[str, Any], check: Any) -> None:
    check(path, arrays, meta)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            np.savez_compressed(file, meta=np.array(json.dumps(dict(meta))), **arrays)  # type: ignore[arg-type]
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except (ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise CountsFileError(f"{path} is no .npz file of arrays") from error
    try:
        meta = json.loads(str(arrays.pop("meta")))
    except KeyError as error:
        raise CountsFileError(f"{path} has no meta") from error
    except json.JSONDecodeError as error:
        raise CountsFileError(f"{path}: meta must be JSON") from error
    return arrays, meta


def _check_counts(path: Path, arrays: Mapping[str, np.ndarray], meta: Any) -> None:
    _check_placement(path, arrays, meta)
    windows, layers, experts = arrays["slot_of_expert"].shape
    counts = _array(path, arrays, "counts", "WLSE")
    if (counts.shape[0], counts.shape[1], counts.shape[3]) != (windows, layers, experts):
        wanted = f"[{windows}, {layers}, S, {experts}] as slot_of_expert says"
        raise CountsFileError(f"{path}: counts must be {wanted}, not {list(counts.shape)}")
    if meta["ranks"] % counts.shape[2]:
        raise CountsFileError(f"{path}: {meta['ranks']} ranks cannot be split over {counts.shape[2]} sources")
    for name, axes, shape in [
        ("transitions", "LEE", (layers - 1, experts, experts)),
        ("request_counts", "NLE", (None, layers, experts)),
    ]:
        if name in arrays:
            found = _array(path, arrays, name, axes).shape
            if any(want is not None and have != want for have, want in zip(found, shape, strict=True)):
                raise CountsFileError(f"{path}: {name} must be {axes} = {shape}, not {found}")


def _check_placement(path: Path, arrays: Mapping[str, np.ndarray], meta: Any) -> None:
    slots = _array(path, arrays, "slot_of_expert", "WLE")
    experts = slots.shape[2]
    if not (np.sort(slots, axis=2) == np.arange(experts)).all():
        raise CountsFileError(f"{path}: slot_of_expert must hold each of the {experts} slots once in every layer")
    ranks = meta.get("ranks") if isinstance(meta, Mapping) else None
    if not isinstance(ranks, int) or ranks < 1 or experts % ranks:
        raise CountsFileError(f"{path}: meta must give ranks, a divisor of {experts} experts, not {ranks}")


def _array(path: Path, arrays: Mapping[str, np.ndarray], name: str, axes: str) -> np.ndarray:
    """The named array, of these axes, none empty, and whole numbers from 0 on."""
    if name not in arrays:
        raise CountsFileError(f"{path} has no {name}")
    array = arrays[name]
    if array.ndim != len(axes) or 0 in array.shape:
        raise CountsFileError(f"{path}: {name} must be {axes}, none of them 0, not {list(array.shape)}")
    if array.dtype.kind not in "iu" or (array < 0).any():
        raise CountsFileError(f"{path}: {name} must be whole numbers from 0 on")
    return array
