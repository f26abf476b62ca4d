"""Device time of an operation: repeated inside one program, so that neither dispatch nor Python counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

Make = Callable[[jax.Array], tuple[Sequence[tuple[Any, ...]], tuple[Any, ...]]]
"""From a random key: several sets of small arguments of its own for an operation, and large ones that all share."""


@dataclass(frozen=True)
class Timed:
    """An operation to time: ``op(*own, *shared)``."""

    name: str
    op: Callable[..., Any]
    make: Make
    facts: Mapping[str, float]
    """Work of one call, for rates."""


def fast_key(seed: int) -> jax.Array:
    """A random key whose numbers are quick to make by the tens of gigabytes."""
    return jax.random.key(seed, impl="rbg")


def looped(op: Callable[..., Any], rounds: int) -> Callable[..., jax.Array]:
    """A program that calls ``op`` on every set in turn, ``rounds`` times over.

    Barriers put each call after the one before it and keep all outputs alive, so that XLA neither merges, hoists
    nor drops calls. The only kernel beside them sums one number of each output, once a round.
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
    """Median, least and most microseconds of a call, from ``n`` samples of ``calls`` calls each."""
    microseconds = [1e6 * s / calls for s in seconds]
    return {
        "median_us": median(microseconds),
        "min_us": min(microseconds),
        "max_us": max(microseconds),
        "n": len(microseconds),
    }


def time_together(cases: Sequence[Timed], key: jax.Array, samples: int, rounds: int) -> list[dict[str, float]]:
    """Time operations on the same arguments, sample by sample in turn, so that drift of clocks meets them alike."""
    own_sets, shared = jax.block_until_ready(jax.jit(cases[0].make)(key))
    programs = [jax.jit(looped(case.op, rounds)).lower(own_sets, shared).compile() for case in cases]
    seconds: list[list[float]] = [[] for _ in cases]
    for sample in range(-1, samples):  # one to warm up
        for program, into in zip(programs, seconds, strict=True):
            began = time.perf_counter()
            jax.block_until_ready(program(own_sets, shared))
            if sample >= 0:
                into.append(time.perf_counter() - began)
    return [timing(into, rounds * len(own_sets)) for into in seconds]
