"""The part of a model that each device of a mesh holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from gimbal_jax.config import MeshConfig, ModelConfig
from gimbal_jax.model.sharding import check_mesh, kv_heads_in_cache


@dataclass(frozen=True)
class Shard:
    """Part of the model on one device; indices count from 0."""

    rank: int
    node: int
    engine: int
    heads: range
    kv_heads: range
    kv_copies: int
    """Devices of its engine that hold the same KV heads."""
    vocabulary: range
    experts: tuple[int, ...]
    """Experts of the chosen layer, in order of their slots."""


def shards(model: ModelConfig, mesh: MeshConfig, slot_of_expert_E: np.ndarray) -> list[Shard]:
    """Return the part of every device, by rank. ValueError for a mesh that does not fit the model or its nodes."""
    check_mesh(model, mesh)
    if mesh.ranks % mesh.nodes:
        raise ValueError(f"nodes = {mesh.nodes} must divide the {mesh.ranks} devices")
    tp, slots = mesh.tp, model.num_experts // mesh.ranks
    copies = kv_heads_in_cache(model, tp) // model.num_kv_heads
    expert_of_slot = np.argsort(slot_of_expert_E)

    def part(size: int, index: int, parts: int) -> range:
        return range(index * size // parts, (index + 1) * size // parts)

    return [
        Shard(
            rank=rank,
            node=rank // mesh.ranks_per_node,
            engine=rank // tp,
            heads=part(model.num_heads, rank % tp, tp),
            kv_heads=part(model.num_kv_heads, rank % tp // copies, tp // copies),
            kv_copies=copies,
            vocabulary=part(model.vocab_size, rank % tp, tp),
            experts=tuple(expert_of_slot[rank * slots : (rank + 1) * slots].tolist()),
        )
        for rank in range(mesh.ranks)
    ]


def shard_table(title: str, held: Sequence[Shard]) -> Table:
    """Return a table with a row for each device and a line between nodes."""
    table = Table(title=title)
    nodes = held[-1].node + 1
    for column in (*["node"] * (nodes > 1), "device", "engine", "heads", "KV heads", "vocabulary", "experts"):
        table.add_column(column, overflow="fold")
    for shard in held:
        shared = f" ({shard.kv_copies} copies)" if shard.kv_copies > 1 else ""
        table.add_row(
            *[str(shard.node)] * (nodes > 1),
            str(shard.rank),
            str(shard.engine),
            ranges(shard.heads),
            ranges(shard.kv_heads) + shared,
            ranges(shard.vocabulary),
            ranges(sorted(shard.experts)),
            end_section=(shard.rank + 1) % (len(held) // nodes) == 0,
        )
    return table


def ranges(numbers: Sequence[int]) -> str:
    """Return rising numbers as text with runs joined: 0-3, 7."""
    if isinstance(numbers, range):
        return f"{numbers.start}-{numbers.stop - 1}" if len(numbers) > 1 else str(numbers.start)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
