"""Facts of networks between nodes, from ``links.toml``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


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
def link_kinds() -> dict[str, Link]:
    """All known kinds by name."""
    table = tomllib.loads(files(__package__).joinpath("links.toml").read_text(encoding="utf-8"))
    return {name: Link(name=name, **facts) for name, facts in table.items()}


def parse_link(text: str | None, nodes: int) -> Link | None:
    """The network that a user means; ValueError for an unknown one, none between several nodes, or one in a node."""
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
