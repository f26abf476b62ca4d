"""Placement decisions in a process of their own: on a thread they would hold Python's lock while a tick wants it."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

from gimbal_jax.serving.placement import child as placement_child


class PlacementProcess(Executor):
    """Runs one decision at a time in a child process, which starts with the first one and ends with this process.

    Functions must be importable, arguments and results picklable. What a call raises comes back as a RuntimeError. If
    the child dies, so does the call that it was at, and the next one gets a new child.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "placement")
        """Waits for the child; the only one that starts it."""
        self._child: subprocess.Popen[bytes] | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._thread.submit(self._run, fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the child at once, and the call in flight with it; always waits."""
        if self._child is not None:
            self._child.kill()
        self._thread.shutdown(cancel_futures=cancel_futures)
        if self._child is not None:
            _end(self._child)

    def _run(self, *call: Any) -> Any:
        message = pickle.dumps(call)
        child = self._living_child()
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(message)
            child.stdin.flush()
            result, error = pickle.load(child.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            raise RuntimeError(f"the placement process ended (exit code {_end(child)})") from None
        if error:
            raise RuntimeError(error)
        return result

    def _living_child(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            if self._child is not None:
                _end(self._child)
            # -P: the folder of this file has modules named like others.
            command = [sys.executable, "-P", placement_child.__file__]
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._child.stdin is not None
            self._child.stdin.write(pickle.dumps(sys.path))  # goes out with its first call
        return self._child


def _end(child: subprocess.Popen[bytes]) -> int:
    """Its exit code; kills it if it lives."""
    child.kill()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # what was not sent yet
            pipe.close()
    return child.wait()
