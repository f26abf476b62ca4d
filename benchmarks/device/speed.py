"""Measure the speed of the kernels, relative to ceilings of the same GPU in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.device.parts import Result
from benchmarks.device.setting import Setting
from benchmarks.device.timing import Timed, fast_key, time_together
from gimbal_jax.pallas_kernels import Backend
from gimbal_jax.pallas_kernels.route_and_count import route_and_count_reference
from gimbal_jax.pallas_kernels.route_and_count_mosaic import route_blocks

SETS = 2
"""Number of argument sets, which timed calls use alternately. Together their arrays exceed the L2 cache."""
FUSED_TARGET = 3.0
"""Minimum speed of the fused kernel relative to plain XLA."""
COUNTING_TARGET = 1.01
"""Maximum time of the fused kernel relative to routing and mapping without counting (paper, Figure 13)."""


def ceilings(setting: Setting) -> Iterator[Result]:
    """Time a large matrix product, and a triad over arrays that are larger than the caches."""
    matmul, triad = ceiling_cases(setting)
    [measured] = _measure(setting, [matmul])
    yield "matmul", {"time": measured, "tflops": matmul.facts["flop"] / measured["median_us"] / 1e6}
    [measured] = _measure(setting, [triad])
    yield "triad", {"time": measured, "tb_per_s": triad.facts["bytes"] / measured["median_us"] / 1e6}


def ceiling_cases(setting: Setting) -> tuple[Timed, Timed]:
    size, elements = setting.sizes.matmul, setting.sizes.triad_bytes // 4

    def squares(key: jax.Array) -> Any:
        a, b = (jax.random.normal(one, (size, size), jnp.bfloat16) for one in jax.random.split(key))
        return [(a, b)], ()

    def lines(key: jax.Array) -> Any:
        a, b = (jax.random.normal(one, (elements,)) for one in jax.random.split(key))
        return [(a, b)], ()

    return (
        Timed("matmul", jnp.matmul, squares, {"flop": 2 * size**3}),
        Timed("triad", lambda a, b: a + 3.0 * b, lines, {"bytes": 3 * 4 * elements}),
    )


def route_speed(setting: Setting) -> Iterator[Result]:
    """Compare the kernel with plain XLA, and with itself without counting (routing and mapping alone)."""
    for name, cases in route_cases(setting):
        fused, plain, uncounted = _measure(setting, cases)
        times = {"fused": fused, "xla": plain, "without_counting": uncounted}
        faster = plain["median_us"] / fused["median_us"]
        counting = fused["median_us"] / uncounted["median_us"]
        yield (
            name,
            {
                **times,
                "faster_than_xla": faster,
                "faster_than_xla_target": FUSED_TARGET,
                "faster_than_xla_met": faster >= FUSED_TARGET,
                "over_uncounted": counting,
                "over_uncounted_target": COUNTING_TARGET,
                "over_uncounted_met": counting <= COUNTING_TARGET,
            },
        )


def route_cases(setting: Setting) -> Iterator[tuple[str, list[Timed]]]:
    model = setting.sizes.model
    how: dict[str, Any] = {"k": model.experts_per_token, "renormalise": True}

    for tokens in setting.sizes.route_tokens:

        def make(key: jax.Array, tokens: int = tokens) -> Any:
            slots = jax.random.permutation(key, jnp.arange(model.num_experts, dtype=jnp.int32))
            keys = jax.random.split(key, SETS)
            return [(jax.random.normal(one, (tokens, model.num_experts)), jnp.ones(tokens, bool)) for one in keys], (
                slots,
            )

        ops: dict[str, Callable[..., Any]] = {
            "fused": partial(setting.ops.route_and_count, **how, ranks=1, backend=setting.backend),
            "xla": partial(route_and_count_reference, **how, ranks=1),
            "uncounted": partial(route_and_map, **how, backend=setting.backend),
        }
        yield f"T={tokens}", [Timed(f"T={tokens} {form}", op, make, {}) for form, op in ops.items()]


def route_and_map(
    logits_TE: jax.Array,
    valid_T: jax.Array,
    slot_of_expert_E: jax.Array,
    *,
    k: int,
    renormalise: bool,
    backend: Backend,
) -> tuple[jax.Array, jax.Array]:
    """Return slots and weights only, [T, k] each."""
    how: dict[str, Any] = {"k": k, "renormalise": renormalise, "ranks": 1}
    if backend == "xla":
        routing = route_and_count_reference(logits_TE, valid_T, slot_of_expert_E, **how)
        return routing.slot_Tk, routing.weight_Tk
    interpret = plgpu.InterpretGPUParams() if backend == "interpret" else None
    blocks = route_blocks(logits_TE, valid_T, slot_of_expert_E, **how, counting=False, interpret=interpret)
    return blocks.slot_Tk, blocks.weight_Tk


def ffn_speed(setting: Setting) -> Iterator[Result]:
    """Measure FLOP/s of the experts, and bytes/s of the weights that the tokens touch."""
    for case in ffn_cases(setting):
        [time] = _measure(setting, [case])
        yield case.name, {"time": time, **_rates(setting, time, case)}


def ffn_cases(setting: Setting) -> Iterator[Timed]:
    """Yield cases of one rank that has all experts of a layer. Every set of arguments has its own routing."""
    model = setting.sizes.model
    experts, k = model.num_experts, model.experts_per_token
    hidden, inner = model.hidden_size, model.moe_intermediate_size

    for tokens in setting.sizes.ffn_tokens:

        def one(key: jax.Array, tokens: int = tokens) -> tuple[jax.Array, ...]:
            logits_NE = jax.random.normal(key, (tokens, experts))
            valid_N, slots_E = jnp.ones(tokens, bool), jnp.arange(experts)
            routing = route_and_count_reference(logits_NE, valid_N, slots_E, k=k, renormalise=True)
            first_P = jnp.cumsum(routing.count_E) - routing.count_E
            place_Nk = first_P[routing.slot_Tk] + routing.position_Tk
            x_ND = jax.random.normal(key, (tokens, hidden), jnp.bfloat16)
            return x_ND, place_Nk, routing.weight_Tk, routing.count_E

        def make(key: jax.Array, one: Callable[..., Any] = one) -> Any:
            weights = (
                jax.random.normal(key, (experts, hidden, 2 * inner), jnp.bfloat16) * hidden**-0.5,
                jax.random.normal(key, (experts, inner, hidden), jnp.bfloat16) * inner**-0.5,
            )
            return [one(key) for key in jax.random.split(key, SETS)], weights

        touched = experts * (1 - (1 - k / experts) ** tokens)  # expected; logits are even
        facts = {
            "flop": tokens * k * 6 * hidden * inner,
            "bytes": touched * 6 * hidden * inner,
        }
        yield Timed(f"N={tokens}", partial(setting.ops.grouped_ffn, backend=setting.backend), make, facts)


def attention_speed(setting: Setting) -> Iterator[Result]:
    """Measure bytes/s of keys and values for decode, and FLOP/s for prefill."""
    for case in attention_cases(setting):
        [time] = _measure(setting, [case])
        yield case.name, {"time": time, **_rates(setting, time, case)}


def attention_cases(setting: Setting) -> Iterator[Timed]:
    sizes = setting.sizes
    model, page, tile = sizes.model, sizes.page_size, sizes.tile
    token_bytes = 2 * 2 * model.num_kv_heads * model.head_dim
    pair_flop = 4 * model.num_heads * model.head_dim  # FLOP of one query and one key

    def op(q_GQHD: Any, table_GM: Any, start_G: Any, count_G: Any, k_pages: Any, v_pages: Any) -> jax.Array:
        groups = table_GM, start_G, count_G
        return setting.ops.paged_attention(q_GQHD, k_pages, v_pages, *groups, backend=setting.backend)

    for rows, context in sizes.decode_rows:
        facts: dict[str, float] = {"bytes": rows * context * token_bytes}
        make = partial(_attention_arguments, setting, rows, 1, [context - 1] * rows, -(-context // page), rows)
        yield Timed(f"decode {rows} x {context}", op, make, facts)
    for tiles, before in sizes.prefill_rows:
        tokens = tiles * tile
        facts = {"flop": pair_flop * (tokens * before + tokens * (tokens + 1) / 2)}
        starts = [before + tile * i for i in range(tiles)]
        make = partial(_attention_arguments, setting, tiles, tile, starts, -(-(before + tokens) // page), 1)
        yield Timed(f"prefill {tokens} after {before}", op, make, facts)


def _attention_arguments(
    setting: Setting, groups: int, queries: int, starts: Sequence[int], pages: int, sequences: int, key: jax.Array
) -> Any:
    """Return arguments of groups, one sequence each or all of one sequence.

    Each set of arguments has pages of its own, in random order.
    """
    model, page = setting.sizes.model, setting.sizes.page_size
    for_q, for_k, for_v, for_pages = jax.random.split(key, 4)
    shape = (SETS * sequences * pages, page, model.num_kv_heads, model.head_dim)
    page_ids = jax.random.permutation(for_pages, jnp.arange(shape[0], dtype=jnp.int32))
    queries_shape = (groups, queries, model.num_heads, model.head_dim)
    own = [
        (
            jax.random.normal(one, queries_shape, jnp.bfloat16),
            jnp.broadcast_to(table, (groups, pages)),
            jnp.array(starts, jnp.int32),
            jnp.full(groups, queries, jnp.int32),
        )
        for one, table in zip(jax.random.split(for_q, SETS), page_ids.reshape(SETS, sequences, pages), strict=True)
    ]
    return own, tuple(jax.random.normal(one, shape, jnp.bfloat16) for one in (for_k, for_v))


def _measure(setting: Setting, cases: Sequence[Timed]) -> list[dict[str, float]]:
    key = fast_key(setting.seed)
    return time_together(cases, key, setting.sizes.samples, setting.sizes.rounds)


def _rates(setting: Setting, time: dict[str, float], case: Timed) -> dict[str, float | None]:
    """Return TFLOP/s and TB/s of a case, as far as its FLOP and bytes are known, and their shares of the ceilings."""
    rates: dict[str, float | None] = {}
    for fact, rate, ceiling in (("flop", "tflops", "matmul"), ("bytes", "tb_per_s", "triad")):
        if fact in case.facts:
            value = case.facts[fact] / time["median_us"] / 1e6
            top = setting.ceiling(ceiling, rate)
            rates |= {rate: value, f"{rate}_share": value / top if top else None}
    return rates
