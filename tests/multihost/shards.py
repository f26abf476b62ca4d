"""Weights on a mesh, compared shard by shard, because no process holds all of them."""

from __future__ import annotations

import hashlib

import jax
import numpy as np
from flax import nnx

Digests = dict[str, dict[str, str]]


def digests(weights: nnx.State) -> Digests:
    """Digest of each parameter, by its name and the rank of the device, for the devices of this process."""
    found: Digests = {}
    for path, variable in nnx.to_flat_state(weights):
        array = variable.get_value()
        rank_of = {device: rank for rank, device in enumerate(array.sharding.mesh.devices.flat)}
        found[".".join(map(str, path))] = {str(rank_of[s.device]): _digest(s) for s in array.addressable_shards}
    return found


def merged(parts: list[Digests]) -> Digests:
    """Digests of all processes together. A rank belongs to one process."""
    ranks = [rank for part in parts for rank in next(iter(part.values()))]
    assert len(ranks) == len(set(ranks))
    return {name: {rank: digest for part in parts for rank, digest in part[name].items()} for name in parts[0]}


def _digest(shard: jax.Shard) -> str:
    values = np.asarray(shard.data)
    return hashlib.sha256(repr((values.shape, str(values.dtype), shard.index)).encode() + values.tobytes()).hexdigest()
