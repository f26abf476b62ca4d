"""What the system says of this process's memory, and giving back what it does not use. Linux only."""

from __future__ import annotations

import ctypes
import re
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HostMemory:
    """Resident bytes of a process."""

    own: int
    """What it has written itself."""
    files: int
    """Pages of files that it has mapped, libraries too; the system may drop them at will."""
    peak: int
    """Most of both together since it began, or since ``forget_peak``."""


def host_memory() -> HostMemory:
    """Of this process, now. OSError where there is no /proc."""
    status = Path("/proc/self/status").read_text()
    own, files, peak = (
        1024 * int(re.findall(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)[0])
        for name in ("RssAnon", "RssFile", "VmHWM")
    )
    return HostMemory(own, files, peak)


def forget_peak() -> None:
    """Let ``HostMemory.peak`` begin anew. OSError where the system does not allow it."""
    Path("/proc/self/clear_refs").write_text("5")


def give_back_freed_memory() -> None:
    """Hand memory that was freed to the system, where the C library can: glibc keeps it for what may come.

    A compiler leaves hundreds of megabytes of it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
