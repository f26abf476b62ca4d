"""Versions, device and driver of a run."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

from benchmarks.device.parts import Result
from benchmarks.device.setting import Setting
from gimbal_jax.pallas_kernels import backend_of

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "tokamax", "numpy")
NVIDIA_SMI = {
    "driver_version": "driver",
    "clocks.sm": "sm_clock_mhz",
    "clocks.max.sm": "max_sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
}


def machine(setting: Setting) -> Iterator[Result]:
    """Yield the versions, jax's first device, and the facts of nvidia-smi if it is installed."""
    yield "python", {"version": platform.python_version(), "machine": platform.machine()} | _versions()
    device = jax.devices()[0]
    yield (
        "device",
        {
            "platform": device.platform,
            "name": device.device_kind,
            "compute_capability": str(getattr(device, "compute_capability", "")),
            "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
            "backend": backend_of(device),
        },
    )
    if facts := _nvidia_smi():
        yield "nvidia_smi", facts


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def _nvidia_smi() -> dict[str, Any]:
    """Return driver, clocks, power limit and temperature of the first GPU; empty without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", f"--query-gpu={','.join(NVIDIA_SMI)}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
    values = [value.strip() for value in answer.stdout.partition("\n")[0].split(",")]
    return dict(zip(NVIDIA_SMI.values(), values, strict=False))
