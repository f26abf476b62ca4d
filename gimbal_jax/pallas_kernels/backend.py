"""The forms of an operation, and the form that a device runs."""

from __future__ import annotations

from typing import Literal

import jax

Backend = Literal["xla", "mosaic", "interpret"]
"""Form of an operation: ``xla`` is plain XLA for any device, and the specification. ``mosaic`` is kernels for NVIDIA
Hopper. ``interpret`` interprets these kernels on the CPU, to test them without a GPU."""

HOPPER = 9
"""Major compute capability of the kernels. No other generation has Hopper's matrix instructions (wgmma)."""


def backend_of(device: jax.Device) -> Backend:
    """Return the fastest form for a device, which may belong to a compile-only topology."""
    if device.platform == "gpu" and int(float(getattr(device, "compute_capability", 0))) == HOPPER:
        return "mosaic"
    return "xla"
