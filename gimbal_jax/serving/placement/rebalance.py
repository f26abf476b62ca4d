"""The placement loop of a server: count traffic, decide beside the engine thread, move experts between steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace

import numpy as np

from gimbal_jax.config import ModelConfig, ServerConfig
from gimbal_jax.exceptions import DevicesLost
from gimbal_jax.scheduler.migration import Round
from gimbal_jax.scheduler.placement import Proposal, propose
from gimbal_jax.scheduler.traffic import expert_pressure_S, smooth_windows
from gimbal_jax.serving.engine.runner import Runner
from gimbal_jax.serving.placement.decision import (
    Decision,
    PlacementStats,
    Propose,
    decide,
    placement_stats,
    relative_gain,
    rounds_between,
)
from gimbal_jax.serving.placement.expert_counts import StepCounts
from gimbal_jax.serving.placement.records import Outcome, PlacementRecord, PlacementTotals

RECORDS = 100
"""Placement decisions kept for clients."""


def move_to(runner: Runner, slot_of_expert_LE: np.ndarray, config: ServerConfig) -> None:
    """Bring a runner that no server uses yet to this placement."""
    for layer, moves in rounds_between(runner.slot_of_expert_LE, slot_of_expert_LE, config):
        runner.migrate(layer, moves)


@dataclass(frozen=True, eq=False)
class ClosedWindow:
    """A window as it was counted."""

    counts_LSE: np.ndarray
    slot_of_expert_LE: np.ndarray
    """The placement in force at its end."""
    steps: int
    step: int
    """The server's step at its end."""
    time: float


class Rebalancer:
    """Traffic, and the placement that follows it. Owned by the engine thread, but for the one decision in flight."""

    def __init__(
        self,
        model: ModelConfig,
        config: ServerConfig,
        runner: Runner,
        executor: Executor,
        policy: Propose | None = None,
        on_window: Callable[[ClosedWindow], None] | None = None,
        on_placement: Callable[[np.ndarray], None] | None = None,
    ) -> None:
        """Decisions are made on ``executor``, one at a time, by ``policy`` or else as the configuration says.

        ``on_window`` and ``on_placement``, which gets each new placement when all its experts have moved, are called on
        the engine thread and must return at once.
        """
        self._config, self._runner, self._executor = config, runner, executor
        self._policy, self._on_window, self._on_placement = policy or propose, on_window, on_placement
        self._policy_name = getattr(policy, "__name__", "custom") if policy else config.placement.policy
        self._k = model.experts_per_token
        shape = (len(model.moe_layers), config.mesh.dp, model.num_experts)
        self.total_LSE = np.zeros(shape, np.int64)
        self.window_LSE = np.zeros(shape, np.int64)
        """Traffic of the last closed window."""
        self.records: deque[PlacementRecord] = deque(maxlen=RECORDS)
        self.totals = PlacementTotals()
        self.experts_moved = 0
        self.bytes_moved = 0
        self.last_rebalance: float | None = None
        self._open_LSE = np.zeros(shape, np.int64)
        self._recent_LSE = np.zeros(shape, np.int64)
        self._smoothed_LSE = np.zeros(shape, np.int64)
        self._window_steps = config.placement.window_steps
        self._counts = StepCounts(runner)
        self._open_steps = self._recent_steps = 0
        self._asked = False
        self._decision: Future[Decision] | None = None
        self._rounds: deque[tuple[int, Round]] = deque()
        self._left_LE: np.ndarray | None = None
        """The placement that the last one applied came from, until a window has judged that."""

    def stepped(self) -> None:
        """A step was enqueued."""
        self._counts.enqueued()

    def fetched(self) -> None:
        """The results of the oldest step in flight were fetched."""
        self._counts.fetched()

    def ask(self) -> None:
        """Close the window at the next tick, however short it is."""
        self._asked = True

    def begin(self, trace_due: bool) -> None:
        """A tick begins: where steps are in flight, what it will want to know of them is counted with their results."""
        if self._counts.in_flight and (trace_due or self._closes_next):
            self._counts.begin()

    def tick(self, now: float, step: int) -> None:
        """Between two steps: move some experts, take in a decision, close the window."""
        if self._rounds:
            began = time.perf_counter()
            self._move(now)
            self._add(migration_seconds=time.perf_counter() - began)
        elif self._decision is not None:
            if self._decision.done():
                self._take_decision(now, step)
        elif self._closes_next and self.collect() and (self._asked or self._open_steps >= self._window_steps):
            self._close_window(now, step)

    @property
    def open_steps(self) -> int:
        """Steps of the window that is open."""
        return self._open_steps + self._counts.uncounted

    @property
    def _closes_next(self) -> bool:
        """Whether closing the window is what comes next."""
        busy = self._rounds or self._decision is not None
        return not busy and (self._asked or self.open_steps >= self._window_steps)

    def collect(self) -> bool:
        """Add what was counted on the devices, as far as that waits for no step.

        False if nothing came in although steps are uncounted: then ``begin`` was too late for it.
        """
        if not self._counts.in_flight:
            self._counts.begin()
        taken = self._counts.take()
        if taken is None:
            return self._counts.uncounted == 0
        counts_LSE, steps = taken
        for sums in (self.total_LSE, self._open_LSE, self._recent_LSE):
            sums += counts_LSE
        self._open_steps += steps
        self._recent_steps += steps
        return True

    def pressure_S(self) -> np.ndarray:
        """Expert pressure of each engine in the steps counted since the last call (paper 4.1)."""
        self.collect()
        ranks, slots = self._config.mesh.ranks, self._runner.slot_of_expert_LE
        form = self._config.dispatch.expert_pressure
        pressure_S = expert_pressure_S(self._recent_LSE, slots, ranks, self._recent_steps, self._k, form)
        self._recent_LSE[:] = 0
        self._recent_steps = 0
        return pressure_S

    def _close_window(self, now: float, step: int) -> None:
        self.window_LSE, slots_LE = self._open_LSE, self._runner.slot_of_expert_LE
        if self._on_window is not None:
            self._on_window(ClosedWindow(self.window_LSE, slots_LE, self._open_steps, step, now))
        self._open_LSE = np.zeros_like(self.window_LSE)
        self._open_steps, self._asked = 0, False
        self._smoothed_LSE = smooth_windows(self._smoothed_LSE, self.window_LSE, self._config.placement.smoothing)
        if self._config.mesh.ranks == 1:
            return  # nothing can move
        self._decision = self._executor.submit(
            decide, self._policy, self._smoothed_LSE, slots_LE, self._config, self.window_LSE, self._left_LE
        )

    def _take_decision(self, now: float, step: int) -> None:
        assert self._decision is not None
        future, self._decision = self._decision, None
        if error := future.exception():
            as_it_was = placement_stats(self.window_LSE, self._runner.slot_of_expert_LE, self._config.mesh)
            record = self._record(now, step, "failed", f"decision failed: {error}", as_it_was, as_it_was)
            self.records.append(record)
            self._add(failed_decisions=1)
            return
        decision = future.result()
        self._add(kept=int(not decision.rounds), decision_seconds=decision.seconds)
        if decision.achieved_gain is not None:
            self.totals = replace(self.totals, achieved_gain=decision.achieved_gain)
            self._left_LE = None
        outcome: Outcome = "migrating" if decision.rounds else "kept"
        proposal = decision.proposal
        record = self._record(now, step, outcome, proposal.reason, decision.before, decision.after, proposal)
        self.records.append(replace(record, seconds=decision.seconds))
        self._rounds.extend(decision.rounds)
        if decision.rounds:
            self._left_LE = self._runner.slot_of_expert_LE

    def _move(self, now: float) -> None:
        """Run rounds up to the byte budget of a tick, and at least one."""
        moved_bytes = 0
        while self._rounds and moved_bytes < self._config.placement.migrate_bytes_per_tick:
            layer, moves = self._rounds.popleft()
            try:
                self._runner.migrate(layer, moves)
            except DevicesLost:
                raise
            except Exception as error:
                # The table of the last complete round stays in force, and it is consistent.
                self._rounds.clear()
                self.records[-1] = replace(self.records[-1], outcome="failed", reason=f"migration failed: {error}")
                self._add(failed_migrations=1)
                self._left_LE = None
                return
            round_bytes = len(moves.src_slot) * self._runner.expert_bytes
            moved_bytes += round_bytes
            self.bytes_moved += round_bytes
        if not self._rounds:
            if self._on_placement is not None:
                self._on_placement(self._runner.slot_of_expert_LE)
            self.records[-1] = replace(self.records[-1], outcome="applied")
            self.experts_moved += self.records[-1].experts_moved
            self.last_rebalance = now
            predicted = relative_gain(self.records[-1].cost_before, self.records[-1].cost_after)
            self._add(applied=1)
            self.totals = replace(self.totals, predicted_gain=predicted, achieved_gain=None)

    def _add(self, **more: float) -> None:
        self.totals = replace(self.totals, **{name: getattr(self.totals, name) + value for name, value in more.items()})

    def _record(
        self,
        now: float,
        step: int,
        outcome: Outcome,
        reason: str,
        before: PlacementStats,
        after: PlacementStats,
        proposal: Proposal | None = None,
    ) -> PlacementRecord:
        return PlacementRecord(
            time=now,
            step=step,
            policy=self._policy_name,
            outcome=outcome,
            reason=reason,
            cost_before=proposal.cost_before if proposal else 0.0,
            cost_after=proposal.cost_after if proposal else 0.0,
            imbalance_before=before.imbalance,
            imbalance_after=after.imbalance,
            remote_share_before=before.remote_share,
            remote_share_after=after.remote_share,
            far_share_before=before.far_share,
            far_share_after=after.far_share,
            experts_moved=proposal.experts_moved if proposal and proposal.apply else 0,
            seconds=0.0,
        )
