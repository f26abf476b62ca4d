"""Redundant experts: shares of pairs, and prices of a run's steps."""

from dataclasses import replace

import numpy as np
import pytest

from gimbal_jax.scheduler.baselines.redundant_experts import replicated_placement
from gimbal_jax.simulation.scenario import Scenario
from gimbal_jax.simulation.work import StepWork
from gimbal_jax.simulation.workload import WorkloadConfig
from research import replicas
from research.replicas import even_pairs_LSP, replica_pairs_LSP, replica_study

LAYERS, SOURCES, EXPERTS, RANKS = 3, 2, 16, 4


@pytest.fixture
def counts_LSE() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.poisson(rng.gamma(0.5, 40, size=(LAYERS, 1, EXPERTS)), size=(LAYERS, SOURCES, EXPERTS))


@pytest.mark.parametrize("redundant", [0, 4, 16])
def test_replicas_share_the_pairs_of_their_expert(counts_LSE, redundant):
    plan = replicated_placement(counts_LSE.sum(axis=1), EXPERTS + redundant, RANKS)
    pairs_LSP = replica_pairs_LSP(counts_LSE, plan)
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            pairs_SP = pairs_LSP[layer][:, plan.expert_of_slot_LP[layer] == expert]
            assert pairs_SP.shape[1] == plan.replicas_LE[layer, expert]
            assert (pairs_SP.sum(axis=1) == counts_LSE[layer, :, expert]).all()
            assert (pairs_SP.max(axis=1) - pairs_SP.min(axis=1) <= 1).all()


def test_even_pairs_keep_the_total_and_are_even(counts_LSE):
    work = StepWork((), counts_LSE, RANKS)
    even = StepWork((), even_pairs_LSP(work, RANKS), RANKS)
    assert (even.pairs_LSP.sum(axis=2) == counts_LSE.sum(axis=2)).all()
    assert (np.ptp(even.load_LR, axis=1) <= SOURCES).all()
    assert (even.active_LR.sum(axis=1) <= work.active_LR.sum(axis=1)).all()
    assert (even.active_LR.sum(axis=1) > work.active_LR.sum(axis=1) - RANKS).all()


SMALL = Scenario("static", workload=WorkloadConfig("azure-code", requests=60, rate=40.0))


def test_a_study_prices_a_run_s_steps_under_other_placements(monkeypatch):
    monkeypatch.setattr(replicas, "WINDOW_STEPS", 20)
    found = replica_study(SMALL)
    assert list(found["experts_s"]) == ["contiguous", *(f"eplb, {n} redundant" for n in (0, 32, 128)), "even"]
    for kind in ("prefill", "decode"):
        assert found["steps"][kind] > 2
        of_kind = {name: seconds[kind] for name, seconds in found["experts_s"].items()}
        assert min(of_kind, key=lambda name: of_kind[name]) == "even"
        assert 0 < of_kind["contiguous"] < found["steps_s"][kind]
    # A decode step of few rows reads more weights if experts have replicas.
    decode = {name: seconds["decode"] for name, seconds in found["experts_s"].items()}
    assert decode["eplb, 128 redundant"] > decode["eplb, 0 redundant"]


def test_a_system_that_moves_experts_is_rejected():
    moving = replace(SMALL, system="moetuner", workload=replace(SMALL.workload, requests=3))
    with pytest.raises(ValueError, match="system moetuner: must keep the contiguous placement"):
        replica_study(moving)
