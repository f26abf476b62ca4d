"""Measure the device time of an operation, repeated inside one program to exclude dispatch and Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

Make = Callable[[jax.Array], tuple[Sequence[tuple[Any, ...]], tuple[Any, ...]]]
"""A function of a random key that returns several sets of small arguments, and large arguments that all sets share."""


@dataclass(frozen=True)
class Timed:
    """An operation to time: ``op(*own, *shared)``."""

    name: str
    op: Callable[..., Any]
    make: Make
    facts: Mapping[str, float]
    """FLOP and bytes of one call, to compute rates."""


def fast_key(seed: int) -> jax.Array:
    """Return a random key whose generator is fast enough for tens of gigabytes."""
    return jax.random.key(seed, impl="rbg")


def looped(op: Callable[..., Any], rounds: int) -> Callable[..., jax.Array]:
    """Return a program that calls ``op`` on every set of arguments, ``rounds`` times.

    Barriers order the calls and keep all outputs alive, so that XLA does not merge, hoist or drop calls. The only other
    kernel sums one number of each output, once a round.
    """

    op = jax.jit(op)  # so that its calls share one lowering

    def run(own_sets: Sequence[tuple[Any, ...]], shared: tuple[Any, ...]) -> jax.Array:
        def one_round(_: jax.Array, token: jax.Array) -> jax.Array:
            before: Any = token
            outputs = []
            for own in own_sets:
                own, before = jax.lax.optimization_barrier((own, before))
                outputs.append(before)
                before = op(*own, *shared)
            outputs.append(jax.lax.optimization_barrier(before))
            return jnp.stack([leaf.ravel()[0].astype(jnp.float32) for leaf in jax.tree.leaves(outputs)]).sum()

        return jax.lax.fori_loop(0, rounds, one_round, jnp.float32(0))

    return run


def timing(seconds: Sequence[float], calls: int = 1) -> dict[str, float]:
    """Return median, minimum and maximum microseconds of a call, from ``n`` samples of ``calls`` calls each."""
    microseconds = [1e6 * s / calls for s in seconds]
    return {
        "median_us": median(microseconds),
        "min_us": min(microseconds),
        "max_us": max(microseconds),
        "n": len(microseconds),
    }


def time_together(cases: Sequence[Timed], key: jax.Array, samples: int, rounds: int) -> list[dict[str, float]]:
    """Time operations on the same arguments, alternating by sample so that clock drift affects all equally."""
    own_sets, shared = jax.block_until_ready(jax.jit(cases[0].make)(key))
    programs = [jax.jit(looped(case.op, rounds)).lower(own_sets, shared).compile() for case in cases]
    seconds: list[list[float]] = [[] for _ in cases]
    for sample in range(-1, samples):  # the first sample warms up
        for program, into in zip(programs, seconds, strict=True):
            began = time.perf_counter()
            jax.block_until_ready(program(own_sets, shared))
            if sample >= 0:
                into.append(time.perf_counter() - began)
    return [timing(into, rounds * len(own_sets)) for into in seconds]
