"""Prices of steps, fitted to measured steps of a real server, to compare the simulator with that server.

A step of one bucket (the shape that the engines' shares were padded to) is priced by

    base + by decode row + by prefill token + by token of the longest context

Each bucket has four numbers of its own, fitted by least squares and never negative. They reproduce the mean of the
measured steps, including occasional slow ones. The host's time between two steps is priced by tick and by token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from gimbal_jax.config import PlacementPolicy
from gimbal_jax.scheduler.migration import Round
from gimbal_jax.simulation.work import EngineWork, StepWork

Bucket = tuple[int, int]
"""(decode rows, prefill tiles), as in ``serving.batch``, which imports jax."""
LEAST_STEPS = 20
"""A bucket with fewer measured steps is priced as the next larger one."""


@dataclass(frozen=True, eq=False)
class MeasuredStep:
    """A step of a real server: its work, its duration, and the host time after it."""

    engines_S: tuple[EngineWork, ...]
    seconds: float
    host_s: float
    """Seconds from the end of this step to the start of the next one, while there was work."""


class MeasuredCosts:
    """``Costs`` of one runner, fitted to measured steps of this runner."""

    def __init__(
        self,
        steps: Sequence[MeasuredStep],
        buckets: Sequence[Bucket],
        tile: int,
        round_s: float = 0.0,
        decision_s: float = 0.0,
    ) -> None:
        """Fit the prices. ``buckets`` is the result of ``serving.batch.step_buckets``.

        ``round_s`` and ``decision_s`` are the seconds of a migration round and of a placement decision.
        Raises ValueError if the largest bucket has fewer than ``LEAST_STEPS`` measured steps.
        """
        self.buckets, self.tile = tuple(buckets), tile
        self._round_s, self._decision_s = round_s, decision_s
        self._outside: Counter[str] = Counter()
        self._prices: dict[Bucket, np.ndarray] = {}
        self._most: dict[Bucket, np.ndarray] = {}
        for bucket in self.buckets:
            own = [step for step in steps if self._bucket(step.engines_S) == bucket]
            if len(own) >= LEAST_STEPS:
                features = np.array([_features(step.engines_S) for step in own])
                self._prices[bucket] = nnls(features, np.array([step.seconds for step in own]))[0]
                self._most[bucket] = features.max(axis=0)
        if self.buckets[-1] not in self._prices:
            raise ValueError(f"steps: bucket {self.buckets[-1]} needs {LEAST_STEPS} measured steps, to price others")
        tokens = np.array([[1.0, _chosen(step.engines_S)] for step in steps])
        self._host_prices = nnls(tokens, np.array([step.host_s for step in steps]))[0]

    def step_parts(self, work: StepWork) -> Mapping[str, float]:
        return self.price(work.engines_S)

    def price(self, engines_S: Sequence[EngineWork]) -> Mapping[str, float]:
        """Return the seconds of a step, and of the host until the next one, independent of the routing of tokens."""
        bucket = self._bucket(engines_S)
        priced = next(b for b in self.buckets if b in self._prices and b[0] >= bucket[0] and b[1] >= bucket[1])
        features = _features(engines_S)
        if priced != bucket or np.any(features > self._most[priced]):
            self._outside["step"] += 1
        return {
            "step": float(features @ self._prices[priced]),
            "host": float(self._host_prices @ (1.0, _chosen(engines_S))),
        }

    def migration_seconds(self, moves: Round, overlapped: bool) -> float:
        """Return the seconds of one call of the compiled exchange. Its buffers have one size for all moves."""
        return 0.0 if overlapped else self._round_s

    def decision_seconds(self, policy: PlacementPolicy) -> float:
        return self._decision_s

    def far_bytes(self, work: StepWork) -> float:
        return 0.0

    @property
    def outside(self) -> Mapping[str, int]:
        return self._outside

    def _bucket(self, engines_S: Sequence[EngineWork]) -> Bucket:
        rows = max(len(engine.decode_contexts) for engine in engines_S)
        tiles = max(sum(-(-tokens // self.tile) for _, tokens in engine.prefill) for engine in engines_S)
        return next((d, n) for d, n in self.buckets if d >= rows and n >= tiles)


def _features(engines_S: Sequence[EngineWork]) -> np.ndarray:
    longest = 0
    for engine in engines_S:
        longest = max(longest, int(engine.decode_contexts.max(initial=0)), *(sum(chunk) for chunk in engine.prefill), 0)
    rows = sum(len(engine.decode_contexts) for engine in engines_S)
    return np.array([1.0, rows, sum(engine.tokens for engine in engines_S) - rows, longest])


def _chosen(engines_S: Sequence[EngineWork]) -> float:
    return float(sum(engine.chosen for engine in engines_S))
