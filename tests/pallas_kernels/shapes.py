"""Named shapes that kernels are tested and measured on."""

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
    "one_expert_each": RoutingShape(tokens=9, experts=16, k=1, ranks=2),
    "qwen3_decode": RoutingShape(tokens=32, experts=128, k=8, ranks=2),
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
    "pages_larger_than_a_block": AttentionShape(
        groups=2, queries=1, heads=2, kv_heads=2, dim=8, page_size=160, pages_per_row=3, num_pages=8
    ),
    "pages_that_do_not_divide_a_block": AttentionShape(
        groups=2, queries=4, heads=2, kv_heads=2, dim=8, page_size=5, pages_per_row=60, num_pages=128
    ),
}
