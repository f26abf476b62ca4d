"""Which form of an operation a device runs."""

from __future__ import annotations

from typing import Literal

import jax

Backend = Literal["xla", "mosaic", "interpret"]
"""``xla``: plain XLA, on any device, and the specification. ``mosaic``: kernels for NVIDIA Hopper.
``interpret``: those kernels interpreted on the CPU, to test them without a GPU."""

HOPPER = 9
"""Major compute capability that the kernels are for: no other generation has Hopper's matrix instructions (wgmma)."""


def backend_of(device: jax.Device) -> Backend:
    """The fastest form that runs on this device, a real one or one of a compile-only topology."""
    if device.platform == "gpu" and int(float(getattr(device, "compute_capability", 0))) == HOPPER:
        return "mosaic"
    return "xla"
