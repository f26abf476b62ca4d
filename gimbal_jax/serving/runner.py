"""What the server needs of the devices: run a step, read the traffic, move experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from gimbal_jax.scheduler.migration import Round
from gimbal_jax.serving.plan import NextToken, Plan

Progress = Callable[[int, int], None]
"""Called with the number done and the number in all."""


class DevicesLost(RuntimeError):
    """The devices no longer hold what a step needs; only a new process can serve on."""


class Runner(Protocol):
    """Real devices (``device_runner``) or simulated ones (``simulation.runner``). Used by the engine thread only."""

    expert_bytes: int
    """Bytes of one expert of one layer."""

    @property
    def slot_of_expert_LE(self) -> np.ndarray:
        """The placement in force; not to be written to."""

    def step(self, plans: Sequence[Plan]) -> list[list[NextToken | None]]:
        """Run one step of all engines; for each engine what it gives for each of its plan's chunks.

        None where that is nothing. What it raises ends all requests: the devices' state may be lost.
        """

    def take_counts(self) -> np.ndarray:
        """Tokens routed since the last call, [L, S, E] int64."""

    def migrate(self, layer: int, moves: Round) -> None:
        """Apply one round of moves to a MoE layer, weights and table together.

        Raises DevicesLost where weights are gone. Whatever else it raises, nothing has changed.
        """

    def compiles_after_warmup(self) -> int:
        """Programs compiled since warm-up; more than 0 is a bug. 0 until warm-up is over."""
