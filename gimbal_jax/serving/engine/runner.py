"""Protocol of the devices, as the core uses them: run steps, read the expert traffic, move experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from gimbal_jax.scheduler.migration import Round
from gimbal_jax.serving.engine.plan import Plan, StepResult

Progress = Callable[[int, int], None]
"""Called with the number done and the total number."""
Pending = Callable[[], list[StepResult]]
"""Waits for a step and returns one result for each engine's plan. Call it once, and in the order of the steps."""
Mark = Callable[[str], None]
"""Called with the phase of the tick that ends now (see ``meters.PhaseTimer.mark``)."""


class Runner(Protocol):
    """Real devices (``runtime.device_runner``) or simulated ones (``simulation.runner``). The engine thread owns it.

    The devices execute the calls in order.
    """

    expert_bytes: int
    """Bytes of one expert of one layer."""
    ahead: int
    """Steps that may be enqueued before the oldest is waited for: 1 if the devices work while the host plans."""

    @property
    def slot_of_expert_LE(self) -> np.ndarray:
        """The placement that the next step will use; read-only."""

    def enqueue(self, plans: Sequence[Plan], mark: Mark) -> Pending:
        """Begin a step of all engines without waiting for it. Marks "batch" once its arrays are made.

        An error of this function or of the one returned ends all requests, because the devices' state may be lost.
        """

    def begin_counts(self) -> Callable[[], np.ndarray]:
        """Read the counters after all steps enqueued so far, and reset them.

        The function returned gives the tokens routed since the last call, int64 [L, S, E]; call it once. It waits for
        those steps, so call it when their results have been fetched.
        """

    def migrate(self, layer: int, moves: Round) -> None:
        """Apply one round of moves to a MoE layer, weights and table together, after the steps enqueued so far.

        Raises DevicesLost if weights are lost. After any other error nothing has changed.
        """

    def compiles_after_warmup(self) -> int:
        """Return the programs compiled since warm-up; more than 0 is a bug. 0 until warm-up is over."""
