"""Facts of GPU kinds, from ``gpus.toml``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str
    description: str
    """As CUDA names it."""
    memory_bytes: int
    """Device memory that CUDA reports."""
    bandwidth: float
    """Of device memory, bytes per second."""
    bf16_flops: float
    """Dense tensor-core rate, FLOP per second."""
    link_bandwidth: float
    """To the other GPUs of its node, bytes per second in one direction."""
    compute_capability: tuple[int, int]
    cores: int
    """Streaming multiprocessors."""
    l2_bytes: int
    clock_ghz: float
    shared_memory_per_core: int
    shared_memory_per_block: int
    """Most that one block may ask for."""


@cache
def gpu_kinds() -> dict[str, Gpu]:
    """All known kinds by name."""
    table = tomllib.loads(files(__package__).joinpath("gpus.toml").read_text(encoding="utf-8"))
    return {
        name: Gpu(name=name, **{**facts, "compute_capability": tuple(facts["compute_capability"])})
        for name, facts in table.items()
    }
