"""What the system says of this process's memory, giving back what it does not use, and large pages. Linux only."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HUGE_PAGE = 2**21
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's mallopt."""
_MADV_COLLAPSE = 25
"""Of Linux 6.1: gather what is there into huge pages, now."""


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


def trim_heap() -> None:
    """Hand memory that was freed to the system, where the C library can: glibc keeps it for what may come.

    A compiler leaves hundreds of megabytes of it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def reuse_freed_memory() -> None:
    """From now on, let the C library keep what is freed for what comes, however large, where it can.

    A step takes tens of megabytes of temporary memory and frees them. By default glibc gets more than 32 of them
    from the system each time, which clears every page anew.
    """
    options = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if options is not None:
        options(_M_MMAP_THRESHOLD, 2**30)
        options(_M_TRIM_THRESHOLD, 2**31 - 1)


def use_huge_pages(places: Iterable[tuple[int, int]]) -> None:
    """Move memory, given by address and bytes, into pages of 2 MiB: reading it through then takes fewer look-ups.

    As far as the system can, else nothing. Takes about two seconds per GB, and keeps what is written there.
    """
    if sys.platform == "linux":
        madvise = ctypes.CDLL(None).madvise
        for address, size in places:
            first, last = -(-address // HUGE_PAGE) * HUGE_PAGE, (address + size) // HUGE_PAGE * HUGE_PAGE
            if first < last:
                madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_COLLAPSE)
