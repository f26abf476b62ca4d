"""Memory of this process: how much it uses, releasing freed memory, and large pages. Linux only."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HUGE_PAGE = 2**21
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Options of glibc's mallopt."""
_MADV_COLLAPSE = 25
"""Advice of Linux 6.1: collect the content of a range into huge pages now."""


@dataclass(frozen=True)
class HostMemory:
    """Resident bytes of a process."""

    own: int
    """Bytes that it has written itself."""
    files: int
    """Bytes of mapped files, libraries included; the system may drop them at any time."""
    peak: int
    """Maximum of both together since the process started, or since ``forget_peak``."""


def host_memory() -> HostMemory:
    """Return the memory of this process. OSError if there is no /proc."""
    status = Path("/proc/self/status").read_text()
    own, files, peak = (
        1024 * int(re.findall(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)[0])
        for name in ("RssAnon", "RssFile", "VmHWM")
    )
    return HostMemory(own, files, peak)


def forget_peak() -> None:
    """Reset ``HostMemory.peak``. OSError if the system does not allow it."""
    Path("/proc/self/clear_refs").write_text("5")


def trim_heap() -> None:
    """Return freed memory to the system, if the C library can. By default glibc keeps it for later allocations.

    Compilation frees hundreds of megabytes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def reuse_freed_memory() -> None:
    """From now on, let the C library keep freed memory for later allocations of any size, if it can.

    A step allocates tens of megabytes and frees them. By default glibc gets blocks of more than 32 MB from the system
    each time, and the system clears every page of them.
    """
    options = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if options is not None:
        options(_M_MMAP_THRESHOLD, 2**30)
        options(_M_TRIM_THRESHOLD, 2**31 - 1)


def use_huge_pages(places: Iterable[tuple[int, int]]) -> None:
    """Move memory, given by address and bytes, into pages of 2 MiB, so that reading it takes fewer look-ups.

    Does nothing where the system cannot. Takes about two seconds per GB and keeps the content.
    """
    if sys.platform == "linux":
        madvise = ctypes.CDLL(None).madvise
        for address, size in places:
            first, last = -(-address // HUGE_PAGE) * HUGE_PAGE, (address + size) // HUGE_PAGE * HUGE_PAGE
            if first < last:
                madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_COLLAPSE)
