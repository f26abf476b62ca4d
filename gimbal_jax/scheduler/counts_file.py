"""Traffic windows and placements as .npz files, written by servers and read by ``gimbal place`` and the simulator.

A counts file holds ``counts`` [W, L, S, E], ``slot_of_expert`` [W, L, E] (the placement when each window closed) and
``meta`` (JSON text, with the number of ranks). An offline profile also has ``transitions`` [L-1, E, E] and
``request_counts`` [N, L, E]. A placement file has no counts.
Axes: W windows, L MoE layers, S sources (DP engines), E experts, N requests.
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
    """An invalid counts or placement file. The message names the file and the violated rule."""


@dataclass(frozen=True, eq=False)
class CountsFile:
    """The content of a counts file."""

    counts_WLSE: np.ndarray
    """Expert tokens of each window, int64."""
    slot_of_expert_WLE: np.ndarray
    """Placement of each window, int32."""
    meta: dict[str, Any]
    """Everything else, at least ``ranks``."""
    transitions_LEE: np.ndarray | None = None
    """[L-1, E, E]: (token, expert of layer l, expert of layer l + 1) triples; None without an offline profile."""
    request_counts_NLE: np.ndarray | None = None
    """Expert tokens of each request; None without an offline profile."""

    @property
    def ranks(self) -> int:
        """Number of ranks that the placements are for."""
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
    """Write windows [W, L, S, E] with their placements [W, L, E], or one window [L, S, E] with its placement [L, E].

    ``meta`` must have ``ranks`` and be valid JSON. The file appears only once it is complete.
    Raises CountsFileError for arrays that ``load_counts`` would reject, and OSError.
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
    """Read a counts file. Raises CountsFileError if it is invalid, and OSError if it cannot be read."""
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
    """Read slot_of_expert_LE and the number of ranks from a placement file, or from a counts file's last window.

    Raises CountsFileError if the file is invalid, and OSError if it cannot be read.
    """
    arrays, meta = _read(path)
    _check_placement(path, arrays, meta)
    return arrays["slot_of_expert"][-1].astype(np.int32), int(meta["ranks"])


def load_placement_of(path: Path, model: ModelConfig, mesh: MeshConfig) -> np.ndarray:
    """Read slot_of_expert_LE as ``load_placement`` does, for this model and mesh.

    Raises CountsFileError if the file is invalid or has the shape of another model or mesh, and OSError.
    """
    slot_of_expert_LE, ranks = load_placement(path)
    shape = len(model.moe_layers), model.num_experts
    if slot_of_expert_LE.shape != shape or ranks != mesh.ranks:
        (layers, experts), found = shape, slot_of_expert_LE.shape
        wanted = f"{layers} layers of {experts} experts on {mesh.ranks} ranks"
        raise CountsFileError(
            f"{path}: the placement must be for {wanted}, not {found[0]} layers of {found[1]} experts on {ranks} ranks"
        )
    return slot_of_expert_LE


def _write(path: Path, arrays: dict[str, np.ndarray], meta: Mapping[str, Any], check: Any) -> None:
    """Check the arrays, write them to a temporary file and rename it."""
    check(path, arrays, meta)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            np.savez_compressed(file, meta=np.array(json.dumps(dict(meta))), **arrays)  # type: ignore[arg-type]
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays and the meta of a file, unchecked."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except (ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise CountsFileError(f"{path}: must be an .npz file of arrays") from error
    try:
        meta = json.loads(str(arrays.pop("meta")))
    except KeyError as error:
        raise CountsFileError(f"{path}: must have meta") from error
    except json.JSONDecodeError as error:
        raise CountsFileError(f"{path}: meta must be JSON") from error
    return arrays, meta


def _check_counts(path: Path, arrays: Mapping[str, np.ndarray], meta: Any) -> None:
    _check_placement(path, arrays, meta)
    windows, layers, experts = arrays["slot_of_expert"].shape
    counts = _array(path, arrays, "counts", "WLSE")
    if (counts.shape[0], counts.shape[1], counts.shape[3]) != (windows, layers, experts):
        wanted = f"[{windows}, {layers}, S, {experts}], the shape of slot_of_expert"
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
    """Return the named array. Raises CountsFileError unless it has these axes, none empty, and integers >= 0."""
    if name not in arrays:
        raise CountsFileError(f"{path}: must have {name}")
    array = arrays[name]
    if array.ndim != len(axes) or 0 in array.shape:
        raise CountsFileError(f"{path}: {name} must be {axes} with every axis at least 1, not {list(array.shape)}")
    if array.dtype.kind not in "iu" or (array < 0).any():
        raise CountsFileError(f"{path}: {name} must be integers of at least 0")
    return array
