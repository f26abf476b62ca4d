"""Routing and counting equal a plain numpy implementation of the rule."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from gimbal_jax.pallas_kernels import Backend, Routing, route_and_count
from gimbal_jax.pallas_kernels.route_and_count_mosaic import route_blocks
from tests.pallas_kernels.shapes import ROUTING, RoutingShape

Case = tuple[RoutingShape, np.ndarray, np.ndarray, np.ndarray]
Expected = tuple[Any, ...]
"""The fields of ``Routing``."""
SMALL = ["tiny", "all_experts", "one_expert_each", "qwen2_decode"]

route = jax.jit(route_and_count, static_argnames=("k", "renormalise", "ranks", "backend"))


def naive(
    logits_TE: np.ndarray, valid_T: np.ndarray, slot_of_expert_E: np.ndarray, k: int, renormalise: bool, ranks: int
) -> Expected:
    """Route token by token, in float64."""
    tokens, experts = logits_TE.shape
    slot_Tk, position_Tk = np.full((tokens, k), -1), np.zeros((tokens, k), int)
    weight_Tk, count_E = np.zeros((tokens, k)), np.zeros(experts, int)
    send_R, place_TR = np.zeros(ranks, int), np.full((tokens, ranks), -1)
    for t in np.flatnonzero(valid_T):
        logits_E = np.where(np.isnan(logits_TE[t]), -np.inf, logits_TE[t].astype(np.float64))
        chosen = np.argsort(-logits_E, kind="stable")[:k]  # ties keep their order
        slot_Tk[t], position_Tk[t] = slot_of_expert_E[chosen], count_E[chosen]
        count_E[chosen] += 1
        on = np.unique(slot_Tk[t] // (experts // ranks))
        place_TR[t, on] = send_R[on]
        send_R[on] += 1
        if np.isfinite(top := logits_E.max()):
            share_E = np.exp(logits_E - top)
            weight_Tk[t] = share_E[chosen] / (share_E[chosen].sum() if renormalise else share_E.sum())
    return slot_Tk, weight_Tk, count_E, position_Tk, send_R, place_TR


def assert_same(got: Routing, want: Expected) -> None:
    """Compare integers exactly and weights with a tolerance."""
    for name, value, expected in zip(Routing._fields, got, want, strict=True):
        tolerance = 2e-6 if name == "weight_Tk" else 0
        np.testing.assert_allclose(value, expected, rtol=tolerance, atol=tolerance / 20, err_msg=name)


def operands(
    shape: RoutingShape, rng: np.random.Generator, *, levels: int, bad: dict[float, float], valid: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return logits, validity and a placement.

    Logits have few levels, so most of them are tied; zeros have both signs. Bad logits and bad rows occur at their
    rates.
    """
    logits_TE = rng.integers(-levels, levels, (shape.tokens, shape.experts)).astype(np.float32) * (8 / levels)
    logits_TE[(logits_TE == 0) & (rng.random(logits_TE.shape) < 0.5)] = -0.0  # tied with 0.0
    for value, rate in bad.items():
        logits_TE[rng.random(logits_TE.shape) < rate] = value
        logits_TE[rng.random(shape.tokens) < 0.1] = value
    return logits_TE, rng.random(shape.tokens) < valid, rng.permutation(shape.experts).astype(np.int32)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = ROUTING[draw(st.sampled_from(SMALL))]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    bad = {value: draw(st.sampled_from([0, 0.1, 0.9])) for value in (np.nan, -np.inf)}
    levels, valid = draw(st.sampled_from([2, 5, 1000])), draw(st.sampled_from([0, 0.5, 1]))
    return shape, *operands(shape, rng, levels=levels, bad=bad, valid=valid)


@given(cases(), st.booleans())
def test_equals_the_naive_rule(case, renormalise):
    check(case, renormalise, "xla")


@pytest.mark.slow
@given(cases())
@settings(max_examples=20)
def test_kernel_equals_the_naive_rule(case):
    check(case, True, "interpret")


def check(case: Case, renormalise: bool, backend: Backend) -> None:
    shape, logits_TE, valid_T, slot_of_expert_E = case
    rule: dict[str, Any] = {"k": shape.k, "renormalise": renormalise, "ranks": shape.ranks}
    got = route(logits_TE, valid_T, slot_of_expert_E, **rule, backend=backend)
    assert_same(got, naive(logits_TE, valid_T, slot_of_expert_E, **rule))
    assert got.count_E.sum() == valid_T.sum() * shape.k


LARGE = [
    "eight_blocks",
    "many_blocks",
    "most_experts",
    "most_ranks",
    "one_more_than_a_block",
    "one_token",
    "qwen3_decode",
    "three_chunks",
]


@pytest.mark.parametrize("name", ["tiny", *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)])
def test_kernel_equals_the_reference(name):
    """Most logits are tied, some of them bad. ``qwen3_prefill`` would take a minute to interpret.

    The other small shapes are compared with the naive rule.
    """
    shape = ROUTING[name]
    args = operands(shape, np.random.default_rng(0), levels=5, bad={np.nan: 0.1, -np.inf: 0.1}, valid=0.8)
    rule = {"k": shape.k, "renormalise": shape.experts % 3 == 0, "ranks": shape.ranks}
    assert_same(route(*args, **rule, backend="interpret"), route(*args, **rule, backend="xla"))


@pytest.mark.parametrize("name", ["one_token", pytest.param("one_more_than_a_block", marks=pytest.mark.slow)])
def test_kernel_without_counting_routes_the_same(name):
    shape = ROUTING[name]
    args = operands(shape, np.random.default_rng(0), levels=5, bad={np.nan: 0.1}, valid=0.8)
    rule: dict[str, Any] = {"k": shape.k, "renormalise": True, "ranks": shape.ranks}
    got = route_blocks(*map(jnp.asarray, args), **rule, counting=False, interpret=plgpu.InterpretGPUParams())
    want = route(*args, **rule, backend="xla")
    np.testing.assert_array_equal(got.slot_Tk, want.slot_Tk)
    np.testing.assert_allclose(got.weight_Tk, want.weight_Tk, rtol=2e-6, atol=1e-7)


@given(cases())
def test_placement_renames_slots_and_nothing_else(case):
    shape, logits_TE, valid_T, slot_of_expert_E = case
    rule: dict[str, Any] = {"k": shape.k, "renormalise": True, "ranks": 1, "backend": "xla"}
    plain = route(logits_TE, valid_T, np.arange(shape.experts, dtype=np.int32), **rule)
    placed = route(logits_TE, valid_T, slot_of_expert_E, **rule)
    renamed_Tk = np.where(plain.slot_Tk >= 0, slot_of_expert_E[plain.slot_Tk], -1)
    assert_same(placed, plain._replace(slot_Tk=renamed_Tk))


LN = np.log([[1, 2, 4, 1], [3, 3, 1, 1]]).astype(np.float32)
BY_HAND = {True: [[2 / 3, 1 / 3], [1 / 2, 1 / 2]], False: [[4 / 8, 2 / 8], [3 / 8, 3 / 8]]}


@pytest.mark.parametrize("renormalise", [True, False])
def test_by_hand(renormalise):
    """The odds are 1:2:4:1 and 3:3:1:1, the slots of the experts 3 2 1 0, and the third token is padding."""
    logits_TE = np.concatenate([LN, np.full((1, 4), np.nan, np.float32)])
    valid_T = np.array([True, True, False])
    got = route(logits_TE, valid_T, np.array([3, 2, 1, 0], np.int32), k=2, renormalise=renormalise, ranks=2)
    want = {
        "slot_Tk": [[1, 2], [3, 2], [-1, -1]],
        "weight_Tk": [*BY_HAND[renormalise], [0, 0]],
        "count_E": [1, 2, 1, 0],
        "position_Tk": [[0, 0], [0, 1], [0, 0]],
        "send_R": [1, 2],
        "place_TR": [[0, 0], [-1, 1], [-1, -1]],
    }
    assert_same(got, tuple(want[name] for name in Routing._fields))


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_row_without_a_finite_logit_counts_k_times_and_weighs_nothing(bad):
    logits_TE = np.full((1, 8), bad, np.float32)
    got = route(logits_TE, np.array([True]), np.arange(8, dtype=np.int32), k=2, renormalise=True)
    assert_same(got, ([[0, 1]], [[0, 0]], [1, 1, 0, 0, 0, 0, 0, 0], [[0, 0]], [1], [[0]]))


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_bfloat16_logits_are_weighed_in_float32(backend):
    rng = np.random.default_rng(0)
    logits_TE = jnp.asarray(rng.normal(size=(6, 8)), jnp.bfloat16)
    args = np.ones(6, bool), np.arange(8, dtype=np.int32)
    got = route(logits_TE, *args, k=2, renormalise=True, backend=backend)
    assert got.weight_Tk.dtype == jnp.float32
    assert_same(got, naive(np.asarray(logits_TE, np.float32), *args, k=2, renormalise=True, ranks=1))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"k": 0}, "k: 0 is not in 1 to 8"),
        ({"k": 9}, "k: 9 is not in 1 to 8"),
        ({"ranks": 3}, "ranks: 3 does not divide 8 experts"),
    ],
)
def test_invalid_arguments_are_rejected(wrong, message):
    with pytest.raises(ValueError, match=message):
        route_and_count(*zeros(8), **{"k": 2, "renormalise": True, **wrong})


def test_the_kernel_rejects_too_many_experts():
    plain = jax.eval_shape(partial(route_and_count, k=2, renormalise=True), *zeros(1024))
    assert plain.count_E.shape == (1024,)
    with pytest.raises(ValueError, match="backend mosaic: 1024 experts on 1 ranks; the kernel takes at most 512 on 64"):
        route_and_count(*zeros(1024), k=2, renormalise=True, backend="mosaic")


def zeros(experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    return jnp.zeros((2, experts)), jnp.ones(2, bool), jnp.arange(experts)
