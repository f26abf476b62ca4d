"""What a simulated step computes, and the interface of what prices it."""

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
    """One engine's share of a step; all empty where it idles."""

    decode_contexts: np.ndarray
    """For each decode row the tokens that it attends to, itself included; int64."""
    prefill: tuple[tuple[int, int], ...]
    """(tokens before it, its tokens) of each prefill chunk."""
    chosen: int
    """Rows and chunks that get logits and a new token."""

    @property
    def tokens(self) -> int:
        return len(self.decode_contexts) + sum(tokens for _, tokens in self.prefill)


@dataclass(frozen=True, eq=False)
class StepWork:
    """A step of all engines: all that its time may depend on."""

    engines_S: tuple[EngineWork, ...]
    pairs_LSP: np.ndarray
    """(token, choice) pairs of this step from each source to each slot, int64."""
    ranks: int

    @cached_property
    def pairs_LSR(self) -> np.ndarray:
        """The same from each source to each rank."""
        layers, sources, slots = self.pairs_LSP.shape
        pairs_LSRP = self.pairs_LSP.reshape(layers, sources, self.ranks, slots // self.ranks)
        return np.einsum("lsrp->lsr", pairs_LSRP)  # several times as fast as sum() over a short last axis

    @cached_property
    def copies_LSR(self) -> np.ndarray:
        """Tokens of each source that each rank gets."""
        tokens_S = np.array([engine.tokens for engine in self.engines_S])
        choices = int(self.pairs_LSR[0].sum()) // max(int(tokens_S.sum()), 1)
        return token_copies_LSR(self.pairs_LSR, tokens_S, choices)

    @cached_property
    def load_LR(self) -> np.ndarray:
        """Pairs that each rank computes."""
        return self.pairs_LSR.sum(axis=1)

    @cached_property
    def active_LR(self) -> np.ndarray:
        """Experts of each rank that got any."""
        load_LP = self.pairs_LSP.sum(axis=1)
        return (load_LP > 0).reshape(len(load_LP), self.ranks, -1).sum(axis=2)


class Costs(Protocol):
    """Prices of one testbed (model, mesh, exchange form). Seconds throughout."""

    def step_parts(self, work: StepWork) -> Mapping[str, float]:
        """Time of a step by part (attention, experts, exchange, ...); the parts add up to the step."""

    def migration_seconds(self, moves: Round, overlapped: bool) -> float:
        """Time that one round of moves of one layer takes from the steps.

        ``overlapped``: the weights travel beside the steps, which then only pay what cannot be hidden.
        """

    def decision_seconds(self, policy: PlacementPolicy) -> float:
        """Time of a placement decision over all layers."""

    def far_bytes(self, work: StepWork) -> float:
        """Bytes that the exchange of a step sends from one node to another, all layers together."""

    @property
    def outside(self) -> Mapping[str, int]:
        """By operation, how often a price was asked for outside of what was measured, and was extrapolated."""


def token_copies_LSR(pairs_LSR: np.ndarray, tokens_S: np.ndarray, choices: int) -> np.ndarray:
    """Tokens of each source that each rank gets, once however many of their experts it holds.

    Expected from the pairs alone, as if each choice fell on a rank on its own (exact for such choices).
    """
    possible_S1 = np.maximum(tokens_S * choices, 1)[:, None]
    return tokens_S[:, None] * (1 - (1 - pairs_LSR / possible_S1) ** choices)
