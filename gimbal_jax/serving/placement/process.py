"""Placement decisions in a child process. On a thread they would hold Python's lock while a tick needs it."""

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
    """Runs calls one at a time in a child process.

    The child starts with the first call and ends with this process. Functions must be importable, and arguments and
    results picklable. If a call raises, its future raises RuntimeError with the same message. If the child dies, the
    call in flight fails with RuntimeError and the next call starts a new child.
    """

    def __init__(self) -> None:
        # The thread waits for the child's answers. Only this thread starts a child.
        self._thread = ThreadPoolExecutor(1, "placement")
        self._child: subprocess.Popen[bytes] | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a call for the child."""
        return self._thread.submit(self._run, fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Kill the child, which fails the call in flight, and wait until it has ended. ``wait`` has no effect."""
        if self._child is not None:
            self._child.kill()
        self._thread.shutdown(cancel_futures=cancel_futures)
        if self._child is not None:
            _end(self._child)

    def _run(self, *call: Any) -> Any:
        """Send a call to the child and return its result."""
        message = pickle.dumps(call)
        child = self._running_child()
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

    def _running_child(self) -> subprocess.Popen[bytes]:
        """Return the child; start a new one if there is none or it has died."""
        if self._child is None or self._child.poll() is not None:
            if self._child is not None:
                _end(self._child)
            # -P keeps the folder of the program out of sys.path: its modules have names of others.
            command = [sys.executable, "-P", placement_child.__file__]
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._child.stdin is not None
            self._child.stdin.write(pickle.dumps(sys.path))  # sent with the first call
        return self._child


def _end(child: subprocess.Popen[bytes]) -> int:
    """Kill the child if it is alive, close its pipes, and return its exit code."""
    child.kill()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # bytes that were not sent yet
            pipe.close()
    return child.wait()
