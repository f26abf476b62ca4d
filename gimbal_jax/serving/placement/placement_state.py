"""The placement in force as a file, so that a server that starts again goes on where the last one was."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from gimbal_jax.config import MeshConfig, ModelConfig
from gimbal_jax.scheduler.counts_file import load_placement_of, save_placement

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
