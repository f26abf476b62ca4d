"""Files of the placement loop: traffic windows as they close, and the placement for the next start."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from gimbal_jax.config import MeshConfig, ModelConfig
from gimbal_jax.scheduler.counts_file import load_placement_of, save_counts, save_placement
from gimbal_jax.serving.placement.records import ClosedWindow

MAX_PENDING = 16
"""Windows that may wait for the disk; one more is left out."""


_log = logging.getLogger(__name__)


class CountsDump:
    """One file a window, ``NAME-STEP.npz``. ``write`` belongs to the engine thread."""

    def __init__(self, folder: Path, name: str, meta: Mapping[str, Any]) -> None:
        """Files get ``meta``, with ``ranks``, and what the window says of itself. Raises OSError for the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._name, self._meta = folder, name, dict(meta)
        self._thread = ThreadPoolExecutor(1, "counts")
        self._taken = self._left_out = 0  # written to by the engine thread
        self._written = self._failed = 0  # written to by the other
        self._said_left_out = self._said_failed = False  # each by its own thread

    @property
    def written(self) -> int:
        return self._written

    @property
    def lost(self) -> int:
        """Windows that could not be written."""
        return self._failed + self._left_out

    def write(self, window: ClosedWindow) -> None:
        """Have the window written soon; returns at once."""
        if self._taken - self._written - self._failed >= MAX_PENDING:
            self._left_out += 1
            if not self._said_left_out:
                _log.warning("windows from step %d on are left out: the disk is too slow", window.step)
                self._said_left_out = True
            return
        self._said_left_out = False
        self._taken += 1
        self._thread.submit(self._write, window)

    def close(self) -> None:
        """Wait for what is being written."""
        self._thread.shutdown()

    def _write(self, window: ClosedWindow) -> None:
        meta = self._meta | {"steps": window.steps, "step": window.step, "time": window.time}
        path = self._folder / f"{self._name}-{window.step:09d}.npz"
        try:
            save_counts(path, window.counts_LSE, window.slot_of_expert_LE, meta)
        except Exception as error:  # whatever it is, serving goes on
            self._failed += 1
            if not self._said_failed:
                _log.warning("windows from step %d on are lost: %s cannot be written: %s", window.step, path, error)
                self._said_failed = True
        else:
            self._written += 1
            if self._said_failed:
                _log.warning("windows are written again from step %d on; %d were lost", window.step, self._failed)
                self._said_failed = False


_log = logging.getLogger(__name__)


class PlacementState:
    """A file that follows the placement, written on a thread of its own."""

    def __init__(self, path: Path, model: ModelConfig, mesh: MeshConfig) -> None:
        """Raises ValueError for a file that holds no placement of this model and mesh, OSError for a folder that
        cannot be made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.found_LE = load_placement_of(path, model, mesh) if path.exists() else None
        """What the file held; None if there was none."""
        self._path, self._meta = path, {"ranks": mesh.ranks}
        self._thread = ThreadPoolExecutor(1, "placement-state")

    def keep(self, slot_of_expert_LE: np.ndarray) -> None:
        """Write this placement soon; it must not change any more. For the engine thread: returns at once."""
        self._thread.submit(self._write, slot_of_expert_LE)

    def close(self) -> None:
        """Wait until the last one is written."""
        self._thread.shutdown()

    def _write(self, slot_of_expert_LE: np.ndarray) -> None:
        try:
            save_placement(self._path, slot_of_expert_LE, self._meta)
        except Exception as error:  # whatever it is, serving goes on
            _log.warning("the placement is not kept: %s cannot be written: %s", self._path, error)
