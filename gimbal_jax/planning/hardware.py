"""Facts of GPU kinds and of networks between nodes, from ``gpus.toml`` and ``links.toml``."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from gimbal_jax.pallas_kernels.backend import HOPPER, Backend


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str
    description: str
    """Its name in CUDA."""
    gpus_per_node: int
    """GPUs of a usual server."""
    memory_bytes: int
    """Device memory that CUDA reports."""
    bandwidth: float
    """Bandwidth of device memory, bytes per second."""
    bf16_flops: float
    """Dense tensor-core rate, FLOP per second."""
    link_bandwidth: float
    """To the other GPUs of its node, bytes per second in one direction."""
    compute_capability: tuple[int, int]
    cores: int
    """Streaming multiprocessors."""
    threads_per_core: int
    """Greatest number of threads on one multiprocessor."""
    fpus_per_core: int
    """Its float32 lanes."""
    l2_bytes: int
    clock_ghz: float
    shared_memory_per_core: int
    shared_memory_per_block: int
    """Most that one block may ask for."""

    @property
    def backend(self) -> Backend:
        """Form of the kernels that this kind runs; agrees with ``backend_of``."""
        return "mosaic" if self.compute_capability[0] == HOPPER else "xla"


@dataclass(frozen=True)
class Link:
    """One kind of network."""

    name: str
    description: str
    bandwidth: float
    """To GPUs of other nodes, bytes per second of each GPU in one direction."""
    latency_s: float
    """Least time of a message between two nodes."""


@cache
def gpu_kinds() -> dict[str, Gpu]:
    """Return all known kinds by name."""
    table = tomllib.loads(files(__package__).joinpath("gpus.toml").read_text(encoding="utf-8"))
    return {
        name: Gpu(name=name, **{**facts, "compute_capability": tuple(facts["compute_capability"])})
        for name, facts in table.items()
    }


def parse_gpus(text: str) -> tuple[Gpu, int, int]:
    """Return kind, number of all GPUs and number of nodes of a text such as ``4xH100`` or ``2x8xH100``.

    More GPUs than a usual node has, as ``16xH100``, are whole nodes; ``1x16xH100`` is one node of 16.
    ValueError for any other text, and for a number that is not one of whole nodes.
    """
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)x(.+)", text)
    if match is None or int(match[2]) < 1 or (match[1] and int(match[1]) < 1):
        raise ValueError(
            f"--gpus {text}: must be a number and a kind, as in 4xH100, or nodes before them, as in 2x8xH100"
        )
    kinds = {name.lower(): gpu for name, gpu in gpu_kinds().items()}
    if match[3].lower() not in kinds:
        raise ValueError(f"--gpus {text}: the kind must be one of {', '.join(gpu_kinds())}")
    gpu, number = kinds[match[3].lower()], int(match[2])
    if match[1]:
        return gpu, int(match[1]) * number, int(match[1])
    if number > gpu.gpus_per_node and number % gpu.gpus_per_node:
        raise ValueError(
            f"--gpus {text}: a node has {gpu.gpus_per_node} GPUs, which do not divide {number}. Give whole nodes, "
            f"as in 2x{gpu.gpus_per_node}x{gpu.name}, or 1x{number}x{gpu.name} for one node of {number}"
        )
    return gpu, number, max(1, number // gpu.gpus_per_node)


@cache
def link_kinds() -> dict[str, Link]:
    """Return all known networks by name."""
    table = tomllib.loads(files(__package__).joinpath("links.toml").read_text(encoding="utf-8"))
    return {name: Link(name=name, **facts) for name, facts in table.items()}


def parse_link(text: str | None, nodes: int) -> Link | None:
    """Return the network that a user names, in any case; None within one node.

    ValueError for an unknown network, no network between several nodes, or a network within one node.
    """
    known = ", ".join(link_kinds())
    if nodes == 1:
        if text is not None:
            raise ValueError(f"--link {text}: --gpus is one node, which needs no network; 2x8xH100 are two")
        return None
    if text is None:
        raise ValueError(f"--link: {nodes} nodes need a network between them, one of {known}")
    if text.lower() not in link_kinds():
        raise ValueError(f"--link {text}: must be one of {known}")
    return link_kinds()[text.lower()]
