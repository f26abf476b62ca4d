"""Study of redundant experts: the steps of one run, priced again under placements that the run did not have.

The server has one slot per expert, so the study reprices a run, and only the time of its experts. EPLB's placements are
decided from the steps before the window in which they are priced, as a server would decide them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from gimbal_jax.config import PlacementPolicy
from gimbal_jax.model.hf_config import PRESETS
from gimbal_jax.scheduler.baselines.redundant_experts import ReplicatedPlacement, replicated_placement
from gimbal_jax.scheduler.migration import Round
from gimbal_jax.simulation.costs import h100_costs
from gimbal_jax.simulation.scenario import Scenario, simulate_scenario
from gimbal_jax.simulation.work import Costs, StepWork

WINDOW_STEPS = 200
PRICED_EVERY = 5
"""Interval of the priced steps. The other steps are only counted."""
REDUNDANT = (0, 32, 128)
"""Numbers of additional experts that EPLB holds, over all ranks."""
Kind = Literal["prefill", "decode"]
"""A step is "prefill" if it computes a part of any prompt."""


def replica_study(scenario: Scenario) -> dict[str, Any]:
    """Return the seconds of the experts by placement and kind of step, and of whole steps as they ran.

    Raises ValueError if the scenario's system does not keep the contiguous placement.
    """
    model = PRESETS[scenario.model]
    costs = h100_costs(scenario.costs, model, scenario.mesh, scenario.exchange)
    watched = WatchedCosts(costs, scenario.mesh.ranks)
    run = simulate_scenario(scenario, costs=watched)
    if not np.array_equal(
        run.slot_of_expert_LE, np.broadcast_to(np.arange(model.num_experts), run.slot_of_expert_LE.shape)
    ):
        raise ValueError(f"system {scenario.system}: must keep the contiguous placement")
    return {
        "experts_s": dict(watched.experts_s),
        "steps_s": watched.steps_s,
        "steps": dict(watched.steps),
    }


class WatchedCosts:
    """Costs that also price some of the steps under other placements."""

    def __init__(self, costs: Costs, ranks: int) -> None:
        self.experts_s: defaultdict[str, dict[Kind, float]] = defaultdict(lambda: {"prefill": 0.0, "decode": 0.0})
        self.steps_s: dict[Kind, float] = {"prefill": 0.0, "decode": 0.0}
        self.steps: Counter[Kind] = Counter()
        self._costs, self._ranks = costs, ranks
        self._counts_LE = np.zeros((0, 0), np.int64)
        self._count = 0
        self._plans: dict[str, ReplicatedPlacement] = {}

    def step_parts(self, work: StepWork) -> Mapping[str, float]:
        parts = self._costs.step_parts(work)
        if self._plans and self._count % PRICED_EVERY == 0:
            self._price(work, parts)
        counts_LE = work.pairs_LSP.sum(axis=1)
        self._counts_LE = self._counts_LE + counts_LE if self._count else counts_LE
        self._count += 1
        if self._count % WINDOW_STEPS == 0:
            experts = self._counts_LE.shape[1]
            self._plans = {
                f"eplb, {redundant} redundant": replicated_placement(self._counts_LE, experts + redundant, self._ranks)
                for redundant in REDUNDANT
            }
            self._counts_LE = self._counts_LE // 2  # smoothed as in the server: the last window weighs half
        return parts

    def migration_seconds(self, moves: Round, overlapped: bool) -> float:
        return self._costs.migration_seconds(moves, overlapped)

    def decision_seconds(self, policy: PlacementPolicy) -> float:
        return self._costs.decision_seconds(policy)

    def far_bytes(self, work: StepWork) -> float:
        return self._costs.far_bytes(work)

    @property
    def outside(self) -> Mapping[str, int]:
        return self._costs.outside

    def _price(self, work: StepWork, parts: Mapping[str, float]) -> None:
        kind: Kind = "prefill" if any(engine.prefill for engine in work.engines_S) else "decode"
        self.steps[kind] += 1
        self.steps_s[kind] += sum(parts.values())
        self.experts_s["contiguous"][kind] += parts["experts"]
        for name, plan in self._plans.items():
            pairs_LSP = replica_pairs_LSP(work.pairs_LSP, plan)
            self.experts_s[name][kind] += self._experts_s(work, pairs_LSP)
        self.experts_s["even"][kind] += self._experts_s(work, even_pairs_LSP(work, self._ranks))

    def _experts_s(self, work: StepWork, pairs_LSP: np.ndarray) -> float:
        return self._costs.step_parts(StepWork(work.engines_S, pairs_LSP, self._ranks))["experts"]


def replica_pairs_LSP(counts_LSE: np.ndarray, plan: ReplicatedPlacement) -> np.ndarray:
    """Return the pairs of each slot. The replicas of an expert share each source's pairs evenly, in whole pairs."""
    expert_LP = plan.expert_of_slot_LP
    # turn_LP: number of earlier slots of the layer that hold the same expert.
    order_LP = np.argsort(expert_LP, axis=1, kind="stable")
    sorted_LP = np.take_along_axis(expert_LP, order_LP, axis=1)
    place_P = np.arange(expert_LP.shape[1])
    begins_LP = np.maximum.accumulate(np.where(np.diff(sorted_LP, axis=1, prepend=-1) != 0, place_P, 0), axis=1)
    turn_LP = np.empty_like(order_LP)
    np.put_along_axis(turn_LP, order_LP, place_P - begins_LP, axis=1)
    counts_LSP = np.take_along_axis(counts_LSE, expert_LP[:, None].astype(np.int64), axis=2)
    replicas_LP = np.take_along_axis(plan.replicas_LE, expert_LP.astype(np.int64), axis=1)
    return (counts_LSP + turn_LP[:, None]) // replicas_LP[:, None]


def even_pairs_LSP(work: StepWork, ranks: int) -> np.ndarray:
    """Return the step's pairs spread evenly over ranks and active experts: the lower bound of all placements."""
    slot_P = np.arange(work.pairs_LSP.shape[2] // ranks)
    active_L = np.maximum(work.active_LR.sum(axis=1) // ranks, 1)[:, None, None, None]
    load_LSR = (work.pairs_LSP.sum(axis=2)[:, :, None] + np.arange(ranks)) // ranks
    pairs_LSRP = np.where(slot_P < active_L, (load_LSR[..., None] + slot_P) // active_L, 0)
    return pairs_LSRP.reshape(work.pairs_LSP.shape)
