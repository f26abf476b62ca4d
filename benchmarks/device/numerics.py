"""Compare the kernels with float64 references on fresh random inputs.

Tolerances of routing: integers must be equal, and float32 weights have a relative error of at most 1e-5. The other
kernels compute in bfloat16, which has 8 significant bits, and sum in float32. The worst row of their result may have an
error of 2 % (norm of the difference over norm of the reference). Rows without work must be exactly 0. Any NaN fails.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device.parts import Result
from benchmarks.device.references import attention_reference, ffn_reference, places_of, route_reference
from benchmarks.device.setting import Setting

WEIGHT_TOLERANCE = 1e-5
ROW_TOLERANCE = 2e-2


@dataclass(frozen=True)
class Case:
    """A jitted operation on host arrays, and its expected result."""

    name: str
    op: partial[Any]
    arguments: tuple[np.ndarray, ...]
    want: Callable[[], Any]


def rng_for(setting: Setting, name: str) -> np.random.Generator:
    """Return the random generator of one part, which does not depend on earlier parts."""
    return np.random.default_rng([setting.seed, zlib.crc32(name.encode())])


def check_route(setting: Setting) -> Iterator[Result]:
    for case in route_cases(setting):
        yield case.name, judge_routing(case.op(*case.arguments), case.want())


def check_ffn(setting: Setting) -> Iterator[Result]:
    for case in ffn_cases(setting):
        yield case.name, judge_rows(case.op(*case.arguments), case.want())


def check_attention(setting: Setting) -> Iterator[Result]:
    for case in attention_cases(setting):
        yield case.name, judge_rows(case.op(*case.arguments), case.want())


def route_cases(setting: Setting) -> Iterator[Case]:
    rng = rng_for(setting, "route")
    route = jax.jit(setting.ops.route_and_count, static_argnames=("k", "renormalise", "ranks", "backend"))
    for tokens, experts, k, ranks in setting.sizes.route_checks:
        for kind in ("normal", "ties", "nan", "padding"):
            logits_TE = rng.normal(size=(tokens, experts)).astype(np.float32)
            valid_T = np.ones(tokens, bool)
            if kind == "ties":
                logits_TE = np.round(logits_TE)
            elif kind == "nan":
                for bad in (np.nan, -np.inf):
                    logits_TE[rng.random(logits_TE.shape) < 0.2] = bad
                    logits_TE[rng.random(tokens) < 0.1] = bad
            elif kind == "padding":
                valid_T = rng.random(tokens) < 0.5
                logits_TE[~valid_T] = np.nan
            slots_E = rng.permutation(experts).astype(np.int32)
            how: dict[str, Any] = {"k": k, "renormalise": kind != "ties", "ranks": ranks}
            yield Case(
                f"T={tokens} E={experts} k={k} {kind}",
                partial(route, **how, backend=setting.backend),
                (logits_TE, valid_T, slots_E),
                partial(route_reference, logits_TE, valid_T, slots_E, **how),
            )


def ffn_cases(setting: Setting) -> Iterator[Case]:
    rng, model = rng_for(setting, "ffn"), setting.sizes.model
    hidden, intermediate = model.hidden_size, model.moe_intermediate_size
    ffn = jax.jit(setting.ops.grouped_ffn, static_argnames="backend")
    for slots in sorted({slots for _, slots in setting.sizes.ffn_checks}):
        gate_up_PDF = _bfloat16(rng, slots, hidden, 2 * intermediate, scale=hidden**-0.5)
        down_PFD = _bfloat16(rng, slots, intermediate, hidden, scale=intermediate**-0.5)
        for tokens in sorted(tokens for tokens, of in setting.sizes.ffn_checks if of == slots):
            k = min(model.experts_per_token, slots)
            slot_Nk = np.argsort(rng.random((tokens, slots)), axis=1)[:, :k].astype(np.int32)
            slot_Nk[rng.random(slot_Nk.shape) < 0.5] = -1  # pairs of other ranks
            slot_Nk[rng.random(tokens) < 0.1] = -1
            x_ND = _bfloat16(rng, tokens, hidden)
            x_ND[(slot_Nk < 0).all(axis=1)] = np.nan
            weight_Nk = rng.random((tokens, k)).astype(np.float32)
            place_Nk, size_P = places_of(slot_Nk, slots)
            yield Case(
                f"N={tokens} P={slots}",
                partial(ffn, backend=setting.backend),
                (x_ND, place_Nk, weight_Nk, size_P, gate_up_PDF, down_PFD),
                partial(ffn_reference, x_ND, slot_Nk, weight_Nk, gate_up_PDF, down_PFD),
            )


def attention_cases(setting: Setting) -> Iterator[Case]:
    rng, sizes = rng_for(setting, "attention"), setting.sizes
    for lengths in sizes.decode_checks:
        groups = tuple((max(n - 1, 0), min(n, 1)) for n in lengths)
        yield _attention_case(setting, rng, f"decode {'/'.join(map(str, lengths))}", 1, groups)
    for groups in sizes.prefill_checks:
        name = "prefill " + "/".join(f"{start}+{count}" for start, count in groups)
        yield _attention_case(setting, rng, name, sizes.tile, groups)


def _attention_case(
    setting: Setting, rng: np.random.Generator, name: str, queries: int, groups: tuple[tuple[int, int], ...]
) -> Case:
    """Return a case in which every group has scattered pages of its own. All values that no token may see are NaN."""
    model, page = setting.sizes.model, setting.sizes.page_size
    needed_G = [-(-(start + count) // page) if count else 0 for start, count in groups]
    unused = iter(1 + rng.permutation(sum(needed_G)))  # page 0 pads the tables and belongs to no group
    shape = (1 + sum(needed_G), page, model.num_kv_heads, model.head_dim)
    k_pages, v_pages = (_bfloat16(rng, *shape) for _ in range(2))
    k_pages[0] = v_pages[0] = np.nan
    table_GM = np.zeros((len(groups), max(needed_G)), np.int32)
    q_GQHD = _bfloat16(rng, len(groups), queries, model.num_heads, model.head_dim)
    for g, (start, count) in enumerate(groups):
        q_GQHD[g, count:] = np.nan
        pages = table_GM[g, : needed_G[g]] = [next(unused) for _ in range(needed_G[g])]
        if used := (start + count) % page * (count > 0):
            k_pages[pages[-1], used:] = v_pages[pages[-1], used:] = np.nan
    start_G, count_G = np.array(groups, np.int32).T
    arguments = (q_GQHD, k_pages, v_pages, table_GM, start_G, count_G)
    attend = jax.jit(setting.ops.paged_attention, static_argnames="backend")
    op = partial(attend, backend=setting.backend)
    return Case(name, op, arguments, partial(_attention_by_group, *arguments))


def _attention_by_group(
    q_GQHD: np.ndarray,
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    table_GM: np.ndarray,
    start_G: np.ndarray,
    count_G: np.ndarray,
) -> np.ndarray:
    want_GQHD = np.zeros(q_GQHD.shape)
    for g, (start, count) in enumerate(zip(start_G, count_G, strict=True)):
        if count:
            pages = table_GM[g, : -(-(start + count) // k_pages.shape[1])]
            k_CKD, v_CKD = (a[pages].reshape(-1, *a.shape[2:])[: start + count] for a in (k_pages, v_pages))
            want_GQHD[g, :count] = attention_reference(q_GQHD[g, :count], k_CKD, v_CKD, start)
    return want_GQHD


def judge_routing(got: Any, want: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the number of wrong values in each field, and the largest relative error of a weight."""
    wrong = {f"wrong_{name}": int((np.asarray(getattr(got, name)) != right).sum()) for name, right in want.items()}
    del wrong["wrong_weight_Tk"]
    right_Tk = want["weight_Tk"]
    worst = float((np.abs(np.asarray(got.weight_Tk) - right_Tk) / np.where(right_Tk > 0, right_Tk, 1.0)).max())
    ok = not any(wrong.values()) and worst <= WEIGHT_TOLERANCE
    return {"ok": ok, **wrong, "worst_weight_error": _json_number(worst)}


def judge_rows(got: jax.Array, want: np.ndarray) -> dict[str, Any]:
    """Return the largest relative error of a row, and the number of rows that should be exactly 0 and are not."""
    right = want.reshape(-1, want.shape[-1])
    rows = np.asarray(got).astype(np.float64).reshape(right.shape)
    length = np.linalg.norm(right, axis=1)
    work = length > 0
    worst = float((np.linalg.norm(rows - right, axis=1)[work] / length[work]).max(initial=0.0))
    wrong_empty = int(rows[~work].any(axis=1).sum())
    ok = worst <= ROW_TOLERANCE and not wrong_empty
    return {"ok": ok, "worst_row_error": _json_number(worst), "wrong_empty_rows": wrong_empty}


def _json_number(value: float) -> float | str:
    """Return NaN and infinities as text, because JSON has neither."""
    return value if math.isfinite(value) else str(value)


def _bfloat16(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(jnp.bfloat16)
