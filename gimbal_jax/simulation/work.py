"""The work of a simulated step, and the interface of its prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from gimbal_jax.config import PlacementPolicy
from gimbal_jax.scheduler.migration import Round


@dataclass(frozen=True, eq=False)
class EngineWork:
    """One engine's share of a step, empty if the engine idles."""

    decode_contexts: np.ndarray
    """Tokens that each decode row attends to, including its own; int64."""
    prefill: tuple[tuple[int, int], ...]
    """(tokens before the chunk, tokens of the chunk) of each prefill chunk."""
    chosen: int
    """Number of rows and chunks that get logits and a new token."""

    @property
    def tokens(self) -> int:
        return len(self.decode_contexts) + sum(tokens for _, tokens in self.prefill)


@dataclass(frozen=True, eq=False)
class StepWork:
    """A step of all engines, with everything that its time may depend on."""

    engines_S: tuple[EngineWork, ...]
    pairs_LSP: np.ndarray
    """(token, choice) pairs of the step from each source to each slot, int64."""
    ranks: int

    @cached_property
    def pairs_LSR(self) -> np.ndarray:
        """Pairs from each source to each rank."""
        layers, sources, slots = self.pairs_LSP.shape
        pairs_LSRP = self.pairs_LSP.reshape(layers, sources, self.ranks, slots // self.ranks)
        return np.einsum("lsrp->lsr", pairs_LSRP)  # several times faster than sum() over a short last axis

    @cached_property
    def copies_LSR(self) -> np.ndarray:
        """Expected tokens of each source that each rank gets."""
        tokens_S = np.array([engine.tokens for engine in self.engines_S])
        choices = int(self.pairs_LSR[0].sum()) // max(int(tokens_S.sum()), 1)
        return token_copies_LSR(self.pairs_LSR, tokens_S, choices)

    @cached_property
    def load_LR(self) -> np.ndarray:
        """Pairs that each rank computes."""
        return self.pairs_LSR.sum(axis=1)

    @cached_property
    def active_LR(self) -> np.ndarray:
        """Number of experts of each rank that got a pair."""
        load_LP = self.pairs_LSP.sum(axis=1)
        return (load_LP > 0).reshape(len(load_LP), self.ranks, -1).sum(axis=2)


class Costs(Protocol):
    """Prices of one testbed (model, mesh, exchange form), in seconds."""

    def step_parts(self, work: StepWork) -> Mapping[str, float]:
        """Return the time of a step by part (attention, experts, exchange, ...). The parts add up to the step."""

    def migration_seconds(self, moves: Round, overlapped: bool) -> float:
        """Return the time by which one round of moves of one layer delays the steps.

        If ``overlapped``, the weights travel while steps run, and only the time that cannot be hidden counts.
        """

    def decision_seconds(self, policy: PlacementPolicy) -> float:
        """Return the time of a placement decision over all layers."""

    def far_bytes(self, work: StepWork) -> float:
        """Return the bytes that the exchange of a step sends between nodes, over all layers."""

    @property
    def outside(self) -> Mapping[str, int]:
        """Number of extrapolated prices, by operation: those outside of what was measured."""


def token_copies_LSR(pairs_LSR: np.ndarray, tokens_S: np.ndarray, choices: int) -> np.ndarray:
    """Return the expected tokens of each source that each rank gets. A rank gets a token once for all its experts.

    The expectation follows from the pairs alone, and is exact if the choices of a token fall on ranks independently.
    """
    possible_S1 = np.maximum(tokens_S * choices, 1)[:, None]
    return tokens_S[:, None] * (1 - (1 - pairs_LSR / possible_S1) ** choices)
