"""The placement loop over a fake runner, with decisions made at once unless a test holds them back."""

from concurrent.futures import Executor, Future
from dataclasses import replace

import numpy as np
import pytest

from gimbal_jax.config import MeshConfig, PlacementConfig, ServerConfig
from gimbal_jax.scheduler.placement import propose
from gimbal_jax.scheduler.traffic import expert_pressure_S, imbalance_L, remote_share
from gimbal_jax.serving import rebalance
from gimbal_jax.serving.rebalance import Rebalancer
from tests.serving.fake_runner import FakeRunner
from tests.serving.fake_server import MODEL as FAKE_MODEL

LAYERS, EXPERTS = 5, 8
MODEL = replace(FAKE_MODEL, num_layers=LAYERS, moe_layers=tuple(range(LAYERS)), num_experts=EXPERTS)
CONFIG = ServerConfig(MeshConfig(2, 2), placement=PlacementConfig(window_steps=3, rows_per_pair=1))
RANKS = CONFIG.mesh.ranks
# All load on the experts that share rank 0 and, of the other source, rank 2: any policy wants to part them.
SKEWED_LSE = np.tile(np.array([[90, 80, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 70, 60, 5, 6]]), (LAYERS, 1, 1))


class AtOnce(Executor):
    def submit(self, fn, /, *args, **kwargs):
        future: Future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Held(Executor):
    """Keeps what is submitted until ``run``."""

    def __init__(self) -> None:
        self.jobs: list = []

    def submit(self, fn, /, *args, **kwargs):
        self.jobs.append((Future(), fn, args))
        return self.jobs[-1][0]

    def run(self):
        future, fn, args = self.jobs.pop()
        future.set_result(fn(*args))


def loop(executor=None, **placement) -> tuple[Rebalancer, FakeRunner]:
    config = replace(CONFIG, placement=replace(CONFIG.placement, **placement))
    runner = FakeRunner(MODEL, config)
    return Rebalancer(MODEL, config, runner, executor or AtOnce()), runner


def steps(rebalancer: Rebalancer, runner: FakeRunner, count: int, counts_LSE=SKEWED_LSE, first: int = 0) -> None:
    """As many steps with this traffic each, and the tick after each of them."""
    for step in range(first, first + count):
        runner.counts_LSE += counts_LSE
        rebalancer.stepped()
        rebalancer.tick(now=float(step), step=step)


def ticks(rebalancer: Rebalancer, count: int, now: float = 100.0) -> None:
    for _ in range(count):
        rebalancer.tick(now, 0)


# -- windows ------------------------------------------------------------------


def test_window_closes_after_its_steps_and_the_next_starts_empty():
    rebalancer, runner = loop(policy="static")
    steps(rebalancer, runner, 2)
    assert not rebalancer.window_LSE.any()
    steps(rebalancer, runner, 1)
    assert np.array_equal(rebalancer.window_LSE, 3 * SKEWED_LSE)
    other_LSE = SKEWED_LSE[:, ::-1]
    steps(rebalancer, runner, 3, other_LSE)
    assert np.array_equal(rebalancer.window_LSE, 3 * other_LSE)
    assert np.array_equal(rebalancer.total_LSE, 3 * SKEWED_LSE + 3 * other_LSE)


def test_looking_in_between_loses_no_traffic():
    rebalancer, runner = loop(policy="static")
    for step in range(3):
        steps(rebalancer, runner, 1, first=step)
        rebalancer.collect()
        rebalancer.pressure_S()
    assert np.array_equal(rebalancer.window_LSE, 3 * SKEWED_LSE)
    assert np.array_equal(rebalancer.total_LSE, 3 * SKEWED_LSE)


def test_a_decision_can_be_asked_for_early():
    rebalancer, runner = loop(policy="static")
    steps(rebalancer, runner, 1)
    rebalancer.ask()
    ticks(rebalancer, 2)
    assert np.array_equal(rebalancer.window_LSE, SKEWED_LSE)
    assert len(rebalancer.records) == 1
    ticks(rebalancer, 5)
    assert len(rebalancer.records) == 1


def test_an_empty_window_keeps_the_placement():
    rebalancer, _ = loop()
    rebalancer.ask()
    ticks(rebalancer, 2)
    (record,) = rebalancer.records
    assert (record.outcome, record.reason) == ("kept", "the window is empty")
    assert (record.imbalance_before, record.remote_share_before) == (1.0, 0.0)


def test_one_decision_at_a_time_and_traffic_goes_on_counting():
    held = Held()
    rebalancer, runner = loop(held)
    steps(rebalancer, runner, 3)
    steps(rebalancer, runner, 10)
    assert len(held.jobs) == 1
    held.run()
    ticks(rebalancer, 20)
    assert [record.outcome for record in rebalancer.records] == ["applied"]
    # The ten steps are the next window, closed as soon as the migration is over.
    assert np.array_equal(rebalancer.window_LSE, 10 * SKEWED_LSE)
    assert len(held.jobs) == 1


# -- migration ----------------------------------------------------------------


@pytest.mark.parametrize("policy", ["gimbal", "eplb"])
def test_applied_decision(policy):
    rebalancer, runner = loop(policy=policy)
    before_LE = runner.slot_of_expert_LE
    wanted = propose(3 * SKEWED_LSE, before_LE, RANKS, replace(CONFIG.placement, policy=policy))
    steps(rebalancer, runner, 3)
    ticks(rebalancer, 1, now=50.0)
    (record,) = rebalancer.records
    assert record.outcome == "migrating"
    assert rebalancer.last_rebalance is None
    ticks(rebalancer, 1, now=51.0)

    (record,) = rebalancer.records
    assert (record.outcome, record.policy, record.time) == ("applied", policy, 50.0)
    assert np.array_equal(runner.slot_of_expert_LE, wanted.slot_of_expert_LE)
    assert record.experts_moved == rebalancer.experts_moved == wanted.experts_moved > 0
    assert record.imbalance_before == imbalance_L(SKEWED_LSE, before_LE, RANKS).mean()
    assert record.imbalance_after == imbalance_L(SKEWED_LSE, wanted.slot_of_expert_LE, RANKS).mean()
    assert record.imbalance_after < record.imbalance_before
    assert record.remote_share_before == remote_share(SKEWED_LSE, before_LE, RANKS)
    assert record.remote_share_after == remote_share(SKEWED_LSE, wanted.slot_of_expert_LE, RANKS)
    assert rebalancer.last_rebalance == 51.0
    moves = sum(len(moves.src_slot) for _, moves in runner.migrated)
    assert rebalancer.bytes_moved == moves * runner.expert_bytes


@pytest.mark.parametrize(("budget", "rounds_of_tick"), [(1, [1, 1, 1, 1, 1]), (500, [2, 2, 1]), (10**9, [5])])
def test_rounds_stop_at_the_byte_budget_of_a_tick(budget, rounds_of_tick):
    rebalancer, runner = loop(policy="eplb", migrate_bytes_per_tick=budget)
    steps(rebalancer, runner, 3)
    ticks(rebalancer, 1)
    rounds = []
    while rebalancer.records[-1].outcome == "migrating":
        done = len(runner.migrated)
        ticks(rebalancer, 1)
        rounds.append(len(runner.migrated) - done)
    assert [len(moves.src_slot) * runner.expert_bytes for _, moves in runner.migrated] == [400] * LAYERS
    assert rounds == rounds_of_tick
    assert rebalancer.bytes_moved == LAYERS * 400


def test_failed_migration_keeps_the_last_complete_round():
    rebalancer, runner = loop(policy="eplb")
    runner.migrations_left = 1
    steps(rebalancer, runner, 3)
    ticks(rebalancer, 2)
    (record,) = rebalancer.records
    assert (record.outcome, record.reason) == ("failed", "migration failed: link down")
    ((layer, done),) = runner.migrated
    assert np.array_equal(runner.slot_of_expert_LE[layer], done.slot_of_expert_E)
    assert np.array_equal(np.sort(runner.slot_of_expert_LE, axis=1), np.tile(np.arange(EXPERTS), (LAYERS, 1)))
    assert rebalancer.experts_moved == 0
    assert rebalancer.last_rebalance is None
    assert rebalancer.bytes_moved == len(done.src_slot) * runner.expert_bytes

    runner.migrations_left = None
    steps(rebalancer, runner, 3)
    ticks(rebalancer, 3)
    assert [record.outcome for record in rebalancer.records] == ["failed", "applied"]


def test_failed_decision_keeps_the_placement_and_the_loop_alive(monkeypatch):
    rebalancer, runner = loop()
    with monkeypatch.context() as patch:
        patch.setattr(rebalance, "propose", lambda *_: 1 // 0)
        steps(rebalancer, runner, 3)
        ticks(rebalancer, 2)
    (record,) = rebalancer.records
    assert record.outcome == "failed"
    assert "decision failed" in record.reason
    assert "zero" in record.reason
    assert record.experts_moved == 0
    assert record.imbalance_before == record.imbalance_after > 1
    assert not runner.migrated
    steps(rebalancer, runner, 3)
    ticks(rebalancer, 3)
    assert rebalancer.records[-1].outcome == "applied"


def test_static_never_moves_and_records_are_bounded():
    rebalancer, runner = loop(policy="static", window_steps=1)
    steps(rebalancer, runner, 2 * rebalance.RECORDS + 10)
    assert len(rebalancer.records) == rebalance.RECORDS
    assert {record.outcome for record in rebalancer.records} == {"kept"}
    assert not runner.migrated


# -- pressure -----------------------------------------------------------------


def test_pressure_is_of_the_steps_since_the_last_call():
    rebalancer, runner = loop(policy="static")
    assert rebalancer.pressure_S().tolist() == [0.0, 0.0]
    steps(rebalancer, runner, 2)
    # Per step and layer, of 2 tokens' experts each: ranks 0 and 1 hold experts 0 to 3.
    halves = SKEWED_LSE[0].sum(axis=0).reshape(2, 4).sum(axis=1)
    assert np.allclose(rebalancer.pressure_S(), halves / MODEL.experts_per_token)
    steps(rebalancer, runner, 4, 2 * SKEWED_LSE)
    assert np.allclose(rebalancer.pressure_S(), 2 * halves / MODEL.experts_per_token)
    assert rebalancer.pressure_S().tolist() == [0.0, 0.0]


def test_pressure_follows_the_placement_in_force():
    rebalancer, runner = loop(policy="eplb")
    steps(rebalancer, runner, 3)
    ticks(rebalancer, 2)
    rebalancer.pressure_S()
    steps(rebalancer, runner, 1)
    expected_S = expert_pressure_S(SKEWED_LSE, runner.slot_of_expert_LE, RANKS, 1, MODEL.experts_per_token)
    assert np.allclose(rebalancer.pressure_S(), expected_S)
