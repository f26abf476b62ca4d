"""The placement loop: close windows of expert traffic, decide on a placement, move experts between steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from gimbal_jax.config import ModelConfig, ServerConfig
from gimbal_jax.exceptions import DevicesLost
from gimbal_jax.scheduler.migration import Round
from gimbal_jax.scheduler.placement import propose
from gimbal_jax.scheduler.traffic import smooth_windows
from gimbal_jax.serving.engine.runner import Runner
from gimbal_jax.serving.placement.decision import (
    Decision,
    Propose,
    decide,
    failed_decision,
    relative_gain,
    rounds_between,
)
from gimbal_jax.serving.placement.records import (
    ClosedWindow,
    Outcome,
    PlacementRecord,
    PlacementStatus,
    PlacementTotals,
)
from gimbal_jax.serving.placement.traffic import ExpertTraffic

RECORDS = 100
"""Placement decisions kept for clients."""


class WindowListener(Protocol):
    """Receives every closed window."""

    @property
    def written(self) -> int:
        """Windows written since start."""

    @property
    def lost(self) -> int:
        """Windows lost since start."""

    def write(self, window: ClosedWindow) -> None:
        """Take a window. The engine thread calls this, so it must return immediately."""


def apply_placement(runner: Runner, slot_of_expert_LE: np.ndarray, config: ServerConfig) -> None:
    """Migrate a runner to this placement, before a server uses the runner."""
    for layer, moves in rounds_between(runner.slot_of_expert_LE, slot_of_expert_LE, config):
        runner.migrate(layer, moves)


@dataclass(frozen=True)
class Counting:
    """Steps are counted until the window is full or a decision is asked for."""


@dataclass(frozen=True, eq=False)
class Deciding:
    """The executor decides on a placement."""

    decision: Future[Decision]


@dataclass(frozen=True, eq=False)
class Migrating:
    """Experts move to the placement that was decided on."""

    record: PlacementRecord
    """The decision, with outcome "migrating"."""
    rounds: deque[tuple[int, Round]]
    """Rounds that are left, as (MoE layer, round)."""
    previous_LE: np.ndarray
    """Placement before the first round."""


class Rebalancer:
    """The placement loop as a state machine: ``Counting``, ``Deciding``, ``Migrating`` and back.

    The engine thread owns it. Only the decision itself runs elsewhere, one at a time, on the executor.

    ``traffic``: all expert traffic of the server; windows are differences of its total.
    ``window_LSE``: expert tokens of the last closed window; 0 before the first.
    ``totals``: counters since start.
    ``windows``: receives every closed window; None if no one wants them.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: ServerConfig,
        runner: Runner,
        executor: Executor | None = None,
        policy: Propose | None = None,
        windows: WindowListener | None = None,
        on_placement: Callable[[np.ndarray], None] | None = None,
    ) -> None:
        """Start counting, with the current placement of ``runner``.

        ``executor``: runs the decisions; by default a thread. ``close`` shuts it down.
        ``policy``: decides instead of the configured policy.
        ``on_placement``: receives each new placement once all its experts have moved. The engine thread calls it, so
        it must return immediately.
        """
        self.traffic = ExpertTraffic(model, config, runner)
        self.window_LSE = np.zeros_like(self.traffic.total_LSE)
        self.totals = PlacementTotals()
        self._config = config
        self._runner = runner
        self._executor = executor or ThreadPoolExecutor(1, "placement")
        self._policy = policy or propose
        self._policy_name = getattr(policy, "__name__", "custom") if policy else config.placement.policy
        self.windows = windows
        self._on_placement = on_placement
        self._state: Counting | Deciding | Migrating = Counting()
        self._ended: deque[PlacementRecord] = deque(maxlen=RECORDS)
        self._asked = False
        # ``traffic.total_LSE`` and ``traffic.counted`` at the start of the open window.
        self._opened_LSE = np.zeros_like(self.traffic.total_LSE)
        self._opened_step = 0
        self._smoothed_LSE = np.zeros_like(self.traffic.total_LSE)
        # Placement before the last change; kept until one window has measured the change.
        self._previous_LE: np.ndarray | None = None

    @property
    def records(self) -> tuple[PlacementRecord, ...]:
        """The last decisions, oldest first, including the one whose experts are moving."""
        current = (self._state.record,) if isinstance(self._state, Migrating) else ()
        return (*self._ended, *current)[-RECORDS:]

    @property
    def open_steps(self) -> int:
        """Steps of the open window, including those whose counts are still on the devices."""
        return self.traffic.enqueued - self._opened_step

    @property
    def window_due(self) -> bool:
        """Whether the window closes as soon as the counts of its steps are collected."""
        full = self.open_steps >= self._config.placement.window_steps
        return isinstance(self._state, Counting) and (self._asked or full)

    def ask(self) -> None:
        """Close the window at the next tick, however short it is. Any thread may call this."""
        self._asked = True

    def tick(self, now: float) -> None:
        """Do the next part of the loop, between two steps."""
        match self._state:
            case Migrating() as migrating:
                self._migrate(migrating, now)
            case Deciding(decision=future):
                if future.done():
                    self._take_decision(future, now)
            case Counting():
                if self.window_due and self._collect_window():
                    self._close_window(now)

    def status(self) -> PlacementStatus:
        """Return a snapshot; call it between ticks."""
        return PlacementStatus(
            slot_of_expert_LE=self._runner.slot_of_expert_LE.copy(),
            window_counts_LSE=self.window_LSE.copy(),
            total_counts_LSE=self.traffic.total_LSE.copy(),
            records=self.records,
            totals=replace(self.totals),
            windows_written=self.windows.written if self.windows else 0,
            windows_lost=self.windows.lost if self.windows else 0,
        )

    def close(self) -> None:
        """Shut the executor down. A decision that has not begun is cancelled."""
        self._executor.shutdown(cancel_futures=True)

    def _collect_window(self) -> bool:
        """Collect counts; return whether the window can close with what is counted now."""
        if not self.traffic.collect():
            return False
        return self._asked or self.traffic.counted - self._opened_step >= self._config.placement.window_steps

    def _close_window(self, now: float) -> None:
        """Hand the window out, open the next one, and begin a decision."""
        traffic, slot_LE = self.traffic, self._runner.slot_of_expert_LE
        self.window_LSE = traffic.total_LSE - self._opened_LSE
        if self.windows is not None:
            steps = traffic.counted - self._opened_step
            self.windows.write(ClosedWindow(self.window_LSE, slot_LE, steps, traffic.fetched, now))
        self._opened_LSE[:] = traffic.total_LSE
        self._opened_step = traffic.counted
        self._asked = False
        self._smoothed_LSE = smooth_windows(self._smoothed_LSE, self.window_LSE, self._config.placement.smoothing)
        if self._config.mesh.ranks > 1:  # with one rank nothing can move
            future = self._executor.submit(
                decide, self._policy, self._smoothed_LSE, slot_LE, self._config, self.window_LSE, self._previous_LE
            )
            self._state = Deciding(future)

    def _take_decision(self, future: Future[Decision], now: float) -> None:
        """Record a decision that is ready, and begin its moves if it has any."""
        slot_LE = self._runner.slot_of_expert_LE
        if error := future.exception():
            self.totals.failed_decisions += 1
            failed = failed_decision(error, self.window_LSE, slot_LE, self._config.mesh)
            self._finish(self._record(failed, "failed", now))
            return
        decision = future.result()
        self.totals.decision_seconds += decision.seconds
        if decision.achieved_gain is not None:
            self.totals.achieved_gain = decision.achieved_gain
            self._previous_LE = None
        if decision.rounds:
            self._previous_LE = None
            self._state = Migrating(self._record(decision, "migrating", now), deque(decision.rounds), slot_LE)
        else:
            self.totals.kept += 1
            self._finish(self._record(decision, "kept", now))

    def _migrate(self, migrating: Migrating, now: float) -> None:
        """Move some experts; the last round applies the placement."""
        began = time.perf_counter()
        try:
            self._run_rounds(migrating.rounds)
        except DevicesLost:
            raise
        except Exception as error:
            # The table of the last complete round stays, and it is consistent.
            self.totals.failed_migrations += 1
            self._finish(replace(migrating.record, outcome="failed", reason=f"migration failed: {error}"))
        else:
            if not migrating.rounds:
                self._complete(migrating, now)
        self.totals.migration_seconds += time.perf_counter() - began

    def _run_rounds(self, rounds: deque[tuple[int, Round]]) -> None:
        """Run rounds until the byte budget of a tick is used up, and at least one."""
        moved_bytes = 0
        while rounds and moved_bytes < self._config.placement.migrate_bytes_per_tick:
            layer, moves = rounds.popleft()
            self._runner.migrate(layer, moves)
            round_bytes = len(moves.src_slot) * self._runner.expert_bytes
            moved_bytes += round_bytes
            self.totals.bytes_moved += round_bytes

    def _complete(self, migrating: Migrating, now: float) -> None:
        """All experts have moved: notify the listener and count the placement as applied."""
        if self._on_placement is not None:
            self._on_placement(self._runner.slot_of_expert_LE)
        record = migrating.record
        self._previous_LE = migrating.previous_LE
        self.totals.applied += 1
        self.totals.experts_moved += record.experts_moved
        self.totals.last_rebalance = now
        self.totals.predicted_gain = relative_gain(record.cost_before, record.cost_after)
        self.totals.achieved_gain = None
        self._finish(replace(record, outcome="applied"))

    def _finish(self, record: PlacementRecord) -> None:
        """Keep the record of a decision that has ended, and count the next window."""
        self._ended.append(record)
        self._state = Counting()

    def _record(self, decision: Decision, outcome: Outcome, now: float) -> PlacementRecord:
        proposal, before, after = decision.proposal, decision.before, decision.after
        return PlacementRecord(
            time=now,
            step=self.traffic.fetched,
            policy=self._policy_name,
            outcome=outcome,
            reason=proposal.reason,
            cost_before=proposal.cost_before,
            cost_after=proposal.cost_after,
            imbalance_before=before.imbalance,
            imbalance_after=after.imbalance,
            remote_share_before=before.remote_share,
            remote_share_after=after.remote_share,
            far_share_before=before.far_share,
            far_share_after=after.far_share,
            experts_moved=proposal.experts_moved if proposal.apply else 0,
            seconds=decision.seconds,
        )
