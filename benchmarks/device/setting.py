"""Inputs of the parts: seed, operations, sizes, and results of earlier parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from gimbal_jax.config import ModelConfig
from gimbal_jax.model.hf_config import PRESETS
from gimbal_jax.pallas_kernels import Backend, grouped_ffn, paged_attention, route_and_count


@dataclass(frozen=True)
class Ops:
    """The public operations to check. A test of the check replaces them with wrong ones."""

    route_and_count: Callable[..., Any] = route_and_count
    grouped_ffn: Callable[..., Any] = grouped_ffn
    paged_attention: Callable[..., Any] = paged_attention


@dataclass(frozen=True)
class Sizes:
    """Sizes of all inputs."""

    model: ModelConfig
    page_size: int
    tile: int
    """Prefill tokens per group."""
    route_checks: tuple[tuple[int, int, int, int], ...]
    """(tokens, experts, k, ranks)."""
    route_tokens: tuple[int, ...]
    """Tokens of the timed cases, with the model's experts."""
    ffn_checks: tuple[tuple[int, int], ...]
    """(tokens, local slots)."""
    ffn_tokens: tuple[int, ...]
    decode_checks: tuple[tuple[int, ...], ...]
    """Context lengths of the rows of a batch; 0 is an empty row."""
    prefill_checks: tuple[tuple[tuple[int, int], ...], ...]
    """(tokens before the tile, tokens in the tile) of the groups of each case."""
    decode_rows: tuple[tuple[int, int], ...]
    """(rows, context) of the timed cases."""
    prefill_rows: tuple[tuple[int, int], ...]
    """(tiles of one sequence, tokens before the first tile) of the timed cases."""
    matmul: int
    """Rows and columns of the square bfloat16 matrix product that measures the ceiling of FLOP/s."""
    triad_bytes: int
    """Bytes of each of the three arrays of the triad that measures the ceiling of bytes/s."""
    batches: tuple[int, ...]
    context: int
    prefill_tokens: int
    samples: int
    """Samples of every timing."""
    rounds: int
    """Number of times that a timed program repeats its calls."""


QWEN = PRESETS["Qwen3-30B-A3B"]
FULL = Sizes(
    model=QWEN,
    page_size=64,
    tile=64,
    route_checks=(
        *((tokens, 128, 8, 4) for tokens in (1, 7, 64, 129, 1000, 8192)),
        (257, 8, 2, 1), (257, 16, 1, 2), (257, 512, 10, 8),
    ),
    route_tokens=(1, 16, 128, 1024, 8192),
    ffn_checks=((1, 32), (7, 32), (128, 32), (1000, 32), (128, 128)),
    ffn_tokens=(1, 8, 64, 128, 1024, 8192),
    decode_checks=((1, 63, 64, 65, 0, 128, 1000, 4096), (32768, 1, 20000, 0)),
    prefill_checks=(((0, 64), (64, 64), (0, 1), (1, 63), (63, 2), (0, 0), (4000, 64), (30000, 64)),),
    decode_rows=((1, 32768), (16, 8192), (128, 1024), (128, 4096)),
    prefill_rows=((32, 0), (32, 6144)),
    matmul=8192,
    triad_bytes=2**30,
    batches=(1, 8, 64, 128),
    context=1024,
    prefill_tokens=2048,
    samples=20,
    rounds=100,
)  # fmt: skip
TINY = Sizes(
    model=replace(
        QWEN, vocab_size=256, hidden_size=64, num_layers=1, moe_layers=(0,), num_heads=4, num_kv_heads=2,
        head_dim=64, num_experts=8, experts_per_token=2, moe_intermediate_size=64,
    ),
    page_size=16,
    tile=8,
    route_checks=((9, 8, 2, 2),),
    route_tokens=(9,),
    ffn_checks=((5, 4),),
    ffn_tokens=(5,),
    decode_checks=((1, 15, 16, 17, 0, 40),),
    prefill_checks=(((0, 8), (16, 3), (0, 0)),),
    decode_rows=((2, 40),),
    prefill_rows=((2, 16),),
    matmul=64,
    triad_bytes=4096,
    batches=(2,),
    context=16,
    prefill_tokens=16,
    samples=3,
    rounds=2,
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """All inputs of a part."""

    sizes: Sizes
    backend: Backend
    seed: int
    ops: Ops = Ops()
    found: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Results of earlier parts, by part and name."""

    def ceiling(self, name: str, unit: str) -> float | None:
        """Return a ceiling that the part ``ceilings`` measured; None if there is no such result."""
        return self.found.get("ceilings", {}).get(name, {}).get(unit)
