"""Traces of host and devices by JAX's profiler, which clients start and stop."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import jax
from smg_grpc_proto.generated import common_pb2

from gimbal_jax.exceptions import InvalidField, Unsupported, require

_UNSUPPORTED = ("start_step", "num_steps", "activities", "with_stack", "record_shapes", "profile_by_stage")
_OUTPUT_DIR = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)
_MAX_OUTPUT_DIR = 200


class Profiler:
    """Writer of traces below ``folder``, one at a time.

    A running trace is kept in memory, and slows requests down until it stops.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._running: Path | None = None  # folder of the running trace

    def start(self, request: common_pb2.StartProfileRequest) -> common_pb2.ProfileResponse:
        """Start a trace. ``stop`` writes it to ``output_dir`` within the folder, by default to the folder itself.

        Raises InvalidField if that path is not within the folder, and Unsupported for every other field.
        """
        for field, _ in request.ListFields():
            if field.name in _UNSUPPORTED:
                raise Unsupported(f"{field.name} is not supported by this server")
        target = _within(self._folder, request.output_dir)
        with self._lock:
            if self._running is not None:
                return _no(f"a trace to {self._running} is running already")
            try:
                target.mkdir(parents=True, exist_ok=True)
                jax.profiler.start_trace(target)
            except (OSError, RuntimeError) as error:
                return _no(f"no trace was started: {error}")
            self._running = target
        return common_pb2.ProfileResponse(success=True, message=f"tracing, to {target}")

    def stop(self) -> common_pb2.ProfileResponse:
        """Stop the trace and write it. The message of the response names its folder."""
        with self._lock:
            if self._running is None:
                return _no("no trace is running")
            target, self._running = self._running, None
            try:
                jax.profiler.stop_trace()
            except (OSError, RuntimeError) as error:
                return _no(f"the trace to {target} was lost: {error}")
        return common_pb2.ProfileResponse(success=True, message=f"the trace is in {target}")


def _no(message: str) -> common_pb2.ProfileResponse:
    return common_pb2.ProfileResponse(success=False, message=message)


def _within(folder: Path, path: str) -> Path:
    folder = folder.resolve()
    if not path:
        return folder
    rule = f"be a path of at most {_MAX_OUTPUT_DIR} letters, digits, '.', '_', '-' and '/'"
    require(
        len(path) <= _MAX_OUTPUT_DIR and _OUTPUT_DIR.fullmatch(path) is not None, "output_dir", rule, repr(path[:99])
    )
    target = (folder / path).resolve()
    if not target.is_relative_to(folder):
        raise InvalidField(f"output_dir must be within the folder of --profile-dir, got {path!r}")
    return target
