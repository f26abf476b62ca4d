"""Named shapes on which kernels are tested and measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoutingShape:
    tokens: int
    experts: int
    k: int
    ranks: int


@dataclass(frozen=True)
class GroupedShape:
    tokens: int
    k: int
    slots: int
    hidden: int
    intermediate: int


@dataclass(frozen=True)
class AttentionShape:
    groups: int
    queries: int
    """Tokens per group: 1 when decoding."""
    heads: int
    kv_heads: int
    dim: int
    page_size: int
    pages_per_row: int
    num_pages: int


ROUTING = {
    "tiny": RoutingShape(tokens=6, experts=8, k=2, ranks=2),
    "all_experts": RoutingShape(tokens=5, experts=4, k=4, ranks=2),
    "one_expert_each": RoutingShape(tokens=9, experts=16, k=1, ranks=16),
    "qwen2_decode": RoutingShape(tokens=7, experts=60, k=4, ranks=4),
    "one_token": RoutingShape(tokens=1, experts=128, k=8, ranks=4),
    "qwen3_decode": RoutingShape(tokens=64, experts=128, k=8, ranks=4),
    "one_more_than_a_block": RoutingShape(tokens=65, experts=160, k=8, ranks=8),
    "most_experts": RoutingShape(tokens=64, experts=512, k=10, ranks=8),
    "most_ranks": RoutingShape(tokens=40, experts=512, k=10, ranks=64),
    "three_chunks": RoutingShape(tokens=100, experts=288, k=6, ranks=1),
    "eight_blocks": RoutingShape(tokens=512, experts=96, k=7, ranks=4),
    "many_blocks": RoutingShape(tokens=8192, experts=8, k=1, ranks=2),
    "qwen3_prefill": RoutingShape(tokens=8192, experts=128, k=8, ranks=4),
}
GROUPED = {
    "one_token": GroupedShape(tokens=1, k=2, slots=4, hidden=16, intermediate=8),
    "decode": GroupedShape(tokens=12, k=2, slots=8, hidden=16, intermediate=8),
    "prefill": GroupedShape(tokens=40, k=4, slots=4, hidden=16, intermediate=8),
    "one_slot": GroupedShape(tokens=20, k=1, slots=1, hidden=16, intermediate=8),
}
ATTENTION = {
    "decode": AttentionShape(
        groups=6, queries=1, heads=4, kv_heads=2, dim=8, page_size=8, pages_per_row=40, num_pages=256
    ),
    "prefill": AttentionShape(
        groups=3, queries=16, heads=4, kv_heads=1, dim=8, page_size=8, pages_per_row=40, num_pages=256
    ),
    "heads_in_threes": AttentionShape(
        groups=3, queries=5, heads=6, kv_heads=2, dim=8, page_size=8, pages_per_row=40, num_pages=256
    ),
    "pages_larger_than_a_block": AttentionShape(
        groups=2, queries=1, heads=2, kv_heads=2, dim=8, page_size=160, pages_per_row=3, num_pages=8
    ),
    "pages_that_do_not_divide_a_block": AttentionShape(
        groups=2, queries=4, heads=2, kv_heads=2, dim=8, page_size=5, pages_per_row=60, num_pages=128
    ),
}
KERNEL_ATTENTION = {
    "pages_of_8": AttentionShape(
        groups=6, queries=1, heads=4, kv_heads=1, dim=64, page_size=8, pages_per_row=30, num_pages=64
    ),
    "pages_of_16": AttentionShape(
        groups=6, queries=1, heads=16, kv_heads=2, dim=64, page_size=16, pages_per_row=15, num_pages=64
    ),
    "pages_of_32": AttentionShape(
        groups=6, queries=1, heads=16, kv_heads=1, dim=64, page_size=32, pages_per_row=7, num_pages=32
    ),
    "pages_of_64": AttentionShape(
        groups=6, queries=1, heads=8, kv_heads=1, dim=128, page_size=64, pages_per_row=5, num_pages=32
    ),
    "pages_of_128": AttentionShape(
        groups=6, queries=1, heads=2, kv_heads=2, dim=64, page_size=128, pages_per_row=5, num_pages=32
    ),
    "tiles_of_8": AttentionShape(
        groups=3, queries=8, heads=8, kv_heads=1, dim=64, page_size=16, pages_per_row=13, num_pages=64
    ),
    "tiles_of_32": AttentionShape(
        groups=2, queries=32, heads=8, kv_heads=1, dim=64, page_size=64, pages_per_row=4, num_pages=16
    ),
    "heads_in_sevens": AttentionShape(
        groups=3, queries=8, heads=7, kv_heads=1, dim=64, page_size=128, pages_per_row=2, num_pages=16
    ),
    "long": AttentionShape(
        groups=1, queries=1, heads=1, kv_heads=1, dim=64, page_size=64, pages_per_row=512, num_pages=513
    ),
}
QWEN3_ATTENTION = {
    "30b_tp2_decode": AttentionShape(
        groups=128, queries=1, heads=16, kv_heads=2, dim=128, page_size=64, pages_per_row=512, num_pages=16_000
    ),
    "30b_tp2_decode_of_one": AttentionShape(
        groups=1, queries=1, heads=16, kv_heads=2, dim=128, page_size=64, pages_per_row=512, num_pages=16_000
    ),
    "30b_tp2_prefill": AttentionShape(
        groups=64, queries=128, heads=16, kv_heads=2, dim=128, page_size=64, pages_per_row=512, num_pages=16_000
    ),
    "30b_tp2_one_tile": AttentionShape(
        groups=1, queries=128, heads=16, kv_heads=2, dim=128, page_size=64, pages_per_row=512, num_pages=16_000
    ),
    "30b_tp1_decode": AttentionShape(
        groups=64, queries=1, heads=32, kv_heads=4, dim=128, page_size=16, pages_per_row=2048, num_pages=64_000
    ),
    "235b_tp4_decode": AttentionShape(
        groups=128, queries=1, heads=16, kv_heads=1, dim=128, page_size=128, pages_per_row=256, num_pages=8_000
    ),
    "235b_tp4_prefill": AttentionShape(
        groups=32, queries=64, heads=16, kv_heads=1, dim=128, page_size=32, pages_per_row=1024, num_pages=32_000
    ),
}
