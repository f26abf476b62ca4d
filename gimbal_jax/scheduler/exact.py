"""The exact reference (paper 5.3): placement as a mixed-integer program, solved by HiGHS. Offline only.

This is the only module of the scheduler that needs scipy, and no other imports it.
Axes: L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import block_array, csr_array, eye_array, kron, vstack

from gimbal_jax.config import LoadTerm
from gimbal_jax.scheduler.objective import Objective

Status = Literal["optimal", "time limit", "nothing found"]

_STEPS = 0.002 * 1.25 ** np.arange(34)
_TANGENTS = np.concatenate([-_STEPS[_STEPS < 1], [0.0], _STEPS])
"""Deviations of a rank's load from the mean at which tangents bound the squared deviation from below.

The tangents underestimate the square by at most 1.3 % between two of these points, and by at most 1e-6 near 0."""
_SCALE = 100.0
"""Factor on the objective for the solver, whose absolute tolerances of 1e-6 and less must not matter."""


@dataclass(frozen=True, eq=False)
class ExactAnswer:
    """The solver's answer for each layer, with a bound on the cost of any better answer."""

    rank_LE: np.ndarray
    """Rank of each expert; the current rank in layers without an answer."""
    cost_L: np.ndarray
    """Cost of the answer by the objective itself, not by the solver's linear form of it."""
    bound_L: np.ndarray
    """Lower bound of the cost of any placement."""
    status_L: tuple[Status, ...]
    """How the search ended; "optimal" means within the requested gap."""
    seconds_L: np.ndarray
    """Seconds of the search."""

    @property
    def gap_L(self) -> np.ndarray:
        """Largest share of the cost that a better placement could save."""
        return np.maximum(self.cost_L - self.bound_L, 0) / np.maximum(self.cost_L, 1e-12)


def exact_answer(
    objective: Objective,
    *,
    time_limit_s: float = 60.0,
    gap: float = 1e-4,
    progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> ExactAnswer:
    """Solve layer by layer, each until its relative gap is at most ``gap`` or ``time_limit_s`` has passed.

    ``progress`` gets the number of solved layers and of all layers after each layer.
    """
    fixed_LER, rank_LE = objective.fixed_LER, objective.old_rank_LE.copy()
    layers = len(rank_LE)
    bound_L, seconds_L = np.zeros(layers), np.zeros(layers)
    status_L: list[Status] = []
    for layer in range(layers):
        began = clock()
        weight_E, config = objective.weight_LE[layer], objective.config
        result = _solve(fixed_LER[layer], weight_E, config.beta, config.load_term, time_limit_s, gap)
        seconds_L[layer] = clock() - began
        # The first E * R variables of the solution say which rank each expert is on.
        if result.x is None:
            status_L.append("nothing found")
        else:
            rank_LE[layer] = result.x[: fixed_LER[layer].size].reshape(fixed_LER[layer].shape).argmax(axis=1)
            status_L.append("optimal" if result.status == 0 else "time limit")
        if result.mip_dual_bound is not None:
            bound_L[layer] = max(0.0, result.mip_dual_bound / _SCALE)
        if progress is not None:
            progress(layer + 1, layers)
    return ExactAnswer(rank_LE, objective.cost_L(rank_LE), bound_L, tuple(status_L), seconds_L)


def _solve(
    fixed_ER: np.ndarray, weight_E: np.ndarray, beta: float, term: LoadTerm, time_limit_s: float, gap: float
) -> OptimizeResult:
    """Solve the program of one layer.

    The variables are x[e, r] (1 if e is on r), d[r] (deviation of the load of r from the mean) and t (the load term).
    For "max" there is one t, and t >= d[r]. For "square" there is a t[r] above the tangents of d[r] ** 2 for each
    rank, and the mean of t[r] counts. Neither form exceeds the objective, so the solver's bound is a bound of it.
    """
    experts, ranks = fixed_ER.shape
    mean = weight_E.sum() / ranks
    each_rank, each_expert, one_rank = eye_array(ranks), eye_array(experts), np.ones((1, ranks))
    # Rows t_above @ (t, d) >= t_least: they keep t above the load term.
    if term == "square":
        terms = ranks
        slopes = 2 * _TANGENTS[:, None]
        t_above = kron(np.ones_like(slopes), each_rank), kron(-slopes, each_rank)
        t_least = np.repeat(-(_TANGENTS**2), ranks)
    else:
        terms = 1
        t_above = csr_array(np.ones((ranks, 1))), -each_rank
        t_least = np.zeros(ranks)
    # Equations: each expert has one rank, each rank E / R experts, and d is the deviation of the load.
    no_load = csr_array((experts + ranks, ranks + terms))
    places = vstack([kron(each_expert, one_rank), kron(np.ones((1, experts)), each_rank)])
    matrix = block_array(
        [
            [places, no_load[:, :ranks], no_load[:, ranks:]],
            [kron(weight_E[None], each_rank), -each_rank, None],
            [None, t_above[1], t_above[0]],
        ]
    )
    equal = np.concatenate([np.ones(experts), np.full(ranks, experts // ranks), np.full(ranks, mean)])
    return milp(
        _SCALE * np.concatenate([fixed_ER.ravel(), np.zeros(ranks), np.full(terms, beta / terms)]),
        constraints=LinearConstraint(
            matrix.tocsc(),
            np.concatenate([equal, t_least]),
            np.concatenate([equal, np.full(len(t_least), np.inf)]),
        ),
        integrality=np.concatenate([np.ones(fixed_ER.size), np.zeros(ranks + terms)]),
        bounds=Bounds(
            np.concatenate([np.zeros(fixed_ER.size), np.full(ranks, -np.inf), np.zeros(terms)]),
            np.concatenate([np.ones(fixed_ER.size), np.full(ranks + terms, np.inf)]),
        ),
        options={"time_limit": time_limit_s, "mip_rel_gap": gap},
    )
