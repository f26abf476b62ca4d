"""Expert traffic of a server: counted on the devices, fetched without waiting for a step, added up on the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gimbal_jax.config import ModelConfig, ServerConfig
from gimbal_jax.scheduler.traffic import expert_pressure_S
from gimbal_jax.serving.engine.runner import Runner


class ExpertTraffic:
    """Expert tokens by MoE layer, source engine and expert. Only the engine thread may use it.

    The devices add up the counts of the steps. ``collect`` adds them to ``total_LSE`` once the steps' results are
    fetched, so that it never waits for the devices.

    ``total_LSE``: expert tokens since start, as far as they are collected.
    ``enqueued``, ``fetched``, ``counted``: steps since start that were enqueued, whose results were fetched, and whose
    counts are in ``total_LSE``. ``counted <= fetched <= enqueued``.
    """

    def __init__(self, model: ModelConfig, config: ServerConfig, runner: Runner) -> None:
        self._config = config
        self._runner = runner
        self._experts_per_token = model.experts_per_token
        self.total_LSE = np.zeros((len(model.moe_layers), config.mesh.dp, model.num_experts), np.int64)
        self.enqueued = 0
        self.fetched = 0
        self.counted = 0
        # Counts that the devices have set aside, and the value of ``enqueued`` at that time.
        self._pending: tuple[Callable[[], np.ndarray], int] | None = None
        # ``total_LSE`` and ``counted`` at the last call of ``pressure_S``.
        self._published_LSE = np.zeros_like(self.total_LSE)
        self._published_steps = 0

    def step_enqueued(self) -> None:
        """Note that a step was enqueued."""
        self.enqueued += 1

    def step_fetched(self) -> None:
        """Note that the results of the oldest step in flight were fetched."""
        self.fetched += 1

    def request_counts(self) -> None:
        """Ask the devices for the counts of the steps in flight, so that a ``collect`` later in this tick gets them."""
        if self.fetched < self.enqueued:
            self._set_aside()

    def collect(self) -> bool:
        """Add the counts that are available now to ``total_LSE``.

        Returns False if steps are uncounted and none of their counts were available.
        """
        if self.fetched == self.enqueued:
            self._set_aside()
        if self._pending is None or self.fetched < self._pending[1]:
            return self.counted == self.enqueued
        counts, steps = self._pending
        self._pending = None
        self.total_LSE += counts()
        self.counted = steps
        return True

    def pressure_S(self) -> np.ndarray:
        """Return the expert pressure of each engine in the steps counted since the last call (paper 4.1).

        The unit is expert tokens per step on the engine's ranks, in token equivalents.
        """
        self.collect()
        recent_LSE = self.total_LSE - self._published_LSE
        steps = self.counted - self._published_steps
        self._published_LSE[:] = self.total_LSE
        self._published_steps = self.counted
        slot_LE, ranks = self._runner.slot_of_expert_LE, self._config.mesh.ranks
        form = self._config.dispatch.expert_pressure
        return expert_pressure_S(recent_LSE, slot_LE, ranks, steps, self._experts_per_token, form)

    def _set_aside(self) -> None:
        """Have the devices set aside the counts of all steps enqueued so far, unless a request is pending."""
        if self._pending is None and self.counted < self.enqueued:
            self._pending = self._runner.begin_counts(), self.enqueued
