"""What the server needs of the devices: run steps, read the traffic, move experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from gimbal_jax.scheduler.migration import Round
from gimbal_jax.serving.engine.plan import Plan, StepResult

Progress = Callable[[int, int], None]
"""Called with the number done and the number in all."""
Pending = Callable[[], list[StepResult]]
"""Waits for a step and returns one result for each engine's plan. Call it once, and in the order of the steps."""
Lap = Callable[[str], None]
"""Called with the name of a part of the tick that ends now (see ``step_profile``)."""


class Runner(Protocol):
    """Real devices (``device_runner``) or simulated ones (``simulation.runner``). Used by the engine thread only.

    What the devices do they do in the order in which it is asked for here.
    """

    expert_bytes: int
    """Bytes of one expert of one layer."""
    ahead: int
    """Steps that may be enqueued before the oldest is waited for: 1 if the devices work while the host plans."""

    @property
    def slot_of_expert_LE(self) -> np.ndarray:
        """The placement in force for the next step; not to be written to."""

    def enqueue(self, plans: Sequence[Plan], lap: Lap) -> Pending:
        """Begin a step of all engines without waiting for it. Laps "batch" once its arrays are made.

        An error of this function or of the one returned ends all requests, because the devices' state may be lost.
        """

    def begin_counts(self) -> Callable[[], np.ndarray]:
        """Take the counters after all steps enqueued so far, which start anew from 0.

        The function returned gives the tokens routed since the last call, [L, S, E] int64, once; it waits for those
        steps, so call it when their results have been fetched.
        """

    def migrate(self, layer: int, moves: Round) -> None:
        """Apply one round of moves to a MoE layer, weights and table together, after the steps enqueued so far.

        Raises DevicesLost where weights are gone. Whatever else it raises, nothing has changed.
        """

    def compiles_after_warmup(self) -> int:
        """Programs compiled since warm-up; more than 0 is a bug. 0 until warm-up is over."""
