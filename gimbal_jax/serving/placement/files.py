"""Files of the placement loop: traffic windows, and the placement for the next start. Each has its own thread."""

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
"""Windows that may wait for the disk. Further windows are dropped."""

_log = logging.getLogger(__name__)


class CountsDump:
    """Writes each window to a file ``NAME-STEP.npz``. Errors are logged and counted, and serving goes on."""

    def __init__(self, folder: Path, name: str, meta: Mapping[str, Any]) -> None:
        """Create the folder; raises OSError.

        Each file gets ``meta``, which must have ``ranks``, and the steps, the last step and the time of its window.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._name = name
        self._meta = dict(meta)
        self._thread = ThreadPoolExecutor(1, "counts")
        # Written by the engine thread.
        self._accepted = 0
        self._dropped = 0
        self._warned_of_drops = False
        # Written by the disk thread.
        self._written = 0
        self._failed = 0
        self._warned_of_failures = False

    @property
    def written(self) -> int:
        """Windows written since start."""
        return self._written

    @property
    def lost(self) -> int:
        """Windows dropped, or not written because of an error, since start."""
        return self._failed + self._dropped

    def write(self, window: ClosedWindow) -> None:
        """Queue the window for writing and return immediately. Only the engine thread may call this."""
        if self._accepted - self._written - self._failed >= MAX_PENDING:
            self._dropped += 1
            if not self._warned_of_drops:
                _log.warning("windows from step %d on are dropped: the disk is too slow", window.step)
                self._warned_of_drops = True
            return
        self._warned_of_drops = False
        self._accepted += 1
        self._thread.submit(self._write, window)

    def close(self) -> None:
        """Wait until the queued windows are written."""
        self._thread.shutdown()

    def _write(self, window: ClosedWindow) -> None:
        meta = self._meta | {"steps": window.steps, "step": window.step, "time": window.time}
        path = self._folder / f"{self._name}-{window.step:09d}.npz"
        try:
            save_counts(path, window.counts_LSE, window.slot_of_expert_LE, meta)
        except Exception as error:  # serving goes on without the file
            self._failed += 1
            if not self._warned_of_failures:
                _log.warning("windows from step %d on are lost: %s cannot be written: %s", window.step, path, error)
                self._warned_of_failures = True
        else:
            self._written += 1
            if self._warned_of_failures:
                _log.warning("windows are written again from step %d on; %d were lost", window.step, self._failed)
                self._warned_of_failures = False


class PlacementState:
    """Keeps the current placement in a file, for the next start."""

    def __init__(self, path: Path, model: ModelConfig, mesh: MeshConfig) -> None:
        """Read the file if it exists, and create its folder if not.

        Raises ValueError if the file holds no placement of this model and mesh, OSError if the folder cannot be
        created. ``found_LE``: the placement that the file held; None if there was no file.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.found_LE = load_placement_of(path, model, mesh) if path.exists() else None
        self._path = path
        self._meta = {"ranks": mesh.ranks}
        self._thread = ThreadPoolExecutor(1, "placement-state")

    def keep(self, slot_of_expert_LE: np.ndarray) -> None:
        """Queue a placement for writing and return immediately. The array must not change any more."""
        self._thread.submit(self._write, slot_of_expert_LE)

    def close(self) -> None:
        """Wait until the queued placements are written."""
        self._thread.shutdown()

    def _write(self, slot_of_expert_LE: np.ndarray) -> None:
        try:
            save_placement(self._path, slot_of_expert_LE, self._meta)
        except Exception as error:  # serving goes on without the file
            _log.warning("the placement is not kept: %s cannot be written: %s", self._path, error)
