"""The placement loop over a fake runner. Decisions are made immediately unless a test holds them back."""

from concurrent.futures import Executor, Future
from dataclasses import replace

import jax
import numpy as np
import pytest

from gimbal_jax.config import DispatchConfig, MeshConfig, PlacementConfig, ServerConfig
from gimbal_jax.exceptions import DevicesLost
from gimbal_jax.scheduler.objective import placement_cost_L
from gimbal_jax.scheduler.placement import Proposal, propose
from gimbal_jax.scheduler.traffic import expert_pressure_S, imbalance_L, remote_share
from gimbal_jax.serving.placement import rebalance
from gimbal_jax.serving.placement.rebalance import Rebalancer, apply_placement
from tests.serving.engine.fake_runner import FakeRunner
from tests.serving.fake_server import MODEL as FAKE_MODEL
from tests.serving.placement.windows import Windows

LAYERS, EXPERTS = 5, 8
MODEL = replace(FAKE_MODEL, num_layers=LAYERS, moe_layers=tuple(range(LAYERS)), num_experts=EXPERTS)
CONFIG = ServerConfig(MeshConfig(2, 2), placement=PlacementConfig(window_steps=3, rows_per_pair=1))
RANKS = CONFIG.mesh.ranks
# One source loads two experts of rank 0, the other two of rank 2. Every policy separates them.
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
    """Keeps a submitted call until ``run``."""

    def __init__(self) -> None:
        self.jobs: list = []

    def submit(self, fn, /, *args, **kwargs):
        self.jobs.append((Future(), fn, args))
        return self.jobs[-1][0]

    def run(self):
        future, fn, args = self.jobs.pop()
        future.set_result(fn(*args))


def loop(executor=None, policy_function=None, windows=None, **placement) -> tuple[Rebalancer, FakeRunner]:
    config = replace(CONFIG, placement=replace(CONFIG.placement, **placement))
    runner = FakeRunner(MODEL, config)
    return Rebalancer(MODEL, config, runner, executor or AtOnce(), policy_function, windows), runner


def steps(rebalancer: Rebalancer, runner: FakeRunner, count: int, counts_LSE=SKEWED_LSE, first: int = 0) -> None:
    """Run ``count`` steps with this traffic each, and a tick after each step."""
    for step in range(first, first + count):
        runner.counts_LSE += counts_LSE
        rebalancer.traffic.step_enqueued()
        rebalancer.traffic.step_fetched()
        rebalancer.tick(now=float(step))


def ticks(rebalancer: Rebalancer, count: int, now: float = 100.0) -> None:
    for _ in range(count):
        rebalancer.tick(now)


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
    assert np.array_equal(rebalancer.traffic.total_LSE, 3 * SKEWED_LSE + 3 * other_LSE)


def test_collecting_early_loses_no_traffic():
    rebalancer, runner = loop(policy="static")
    for step in range(3):
        steps(rebalancer, runner, 1, first=step)
        rebalancer.traffic.collect()
        rebalancer.traffic.pressure_S()
    assert np.array_equal(rebalancer.window_LSE, 3 * SKEWED_LSE)
    assert np.array_equal(rebalancer.traffic.total_LSE, 3 * SKEWED_LSE)


def test_ask_closes_the_window_early():
    rebalancer, runner = loop(policy="static")
    steps(rebalancer, runner, 1)
    rebalancer.ask()
    ticks(rebalancer, 2)
    assert np.array_equal(rebalancer.window_LSE, SKEWED_LSE)
    assert len(rebalancer.records) == 1
    ticks(rebalancer, 5)
    assert len(rebalancer.records) == 1


def test_smoothing_adds_earlier_windows_to_decisions_only():
    seen = []

    def remember(counts_LSE, *others):
        seen.append(counts_LSE)
        return propose(counts_LSE, *others)

    rebalancer, runner = loop(policy="static", policy_function=remember, smoothing=0.5)
    other_LSE = SKEWED_LSE[:, ::-1]
    for counts_LSE in (SKEWED_LSE, other_LSE, 0 * SKEWED_LSE):
        steps(rebalancer, runner, 3, counts_LSE)
        ticks(rebalancer, 1)
    assert np.array_equal(seen[0], 3 * SKEWED_LSE)
    assert np.array_equal(seen[1], 3 * other_LSE + 1.5 * SKEWED_LSE)
    assert np.array_equal(seen[2], 1.5 * other_LSE + 0.75 * SKEWED_LSE)
    assert not rebalancer.window_LSE.any()


def test_listener_receives_each_window_as_counted():
    windows = Windows()
    rebalancer, runner = loop(policy="eplb", windows=windows)
    before_LE = runner.slot_of_expert_LE
    steps(rebalancer, runner, 3)
    ticks(rebalancer, 3)
    rebalancer.ask()
    steps(rebalancer, runner, 2, first=10)
    first, second = windows.closed
    assert np.array_equal(first.counts_LSE, 3 * SKEWED_LSE)
    assert (first.steps, first.step, first.time) == (3, 3, 2.0)
    assert np.array_equal(first.slot_of_expert_LE, before_LE)
    assert np.array_equal(second.counts_LSE, SKEWED_LSE)
    assert (second.steps, second.step) == (1, 4)
    assert not np.array_equal(second.slot_of_expert_LE, before_LE)


def test_empty_window_keeps_the_placement():
    rebalancer, _ = loop()
    rebalancer.ask()
    ticks(rebalancer, 2)
    (record,) = rebalancer.records
    assert (record.outcome, record.reason) == ("kept", "the window is empty")
    assert (record.imbalance_before, record.remote_share_before) == (1.0, 0.0)


def test_traffic_counts_while_one_decision_runs():
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


@pytest.mark.parametrize("complete", [True, False])
def test_on_placement_is_called_once_all_experts_have_moved(complete):
    placements: list[np.ndarray] = []
    config = replace(CONFIG, placement=replace(CONFIG.placement, policy="eplb"))
    runner = FakeRunner(MODEL, config)
    rebalancer = Rebalancer(MODEL, config, runner, AtOnce(), on_placement=placements.append)
    steps(rebalancer, runner, config.placement.window_steps)
    assert placements == []
    if not complete:
        runner.migrations_left = 0
    ticks(rebalancer, 20)
    assert len(placements) == int(complete)
    if complete:
        np.testing.assert_array_equal(placements[0], runner.slot_of_expert_LE)


@pytest.mark.parametrize("policy", ["gimbal", "eplb"])
def test_applied_decision_is_recorded_with_its_stats(policy):
    rebalancer, runner = loop(policy=policy)
    before_LE = runner.slot_of_expert_LE
    wanted = propose(3 * SKEWED_LSE, before_LE, CONFIG.mesh, replace(CONFIG.placement, policy=policy))
    steps(rebalancer, runner, 3)
    ticks(rebalancer, 1, now=50.0)
    (record,) = rebalancer.records
    assert record.outcome == "migrating"
    assert rebalancer.totals.last_rebalance is None
    ticks(rebalancer, 1, now=51.0)

    (record,) = rebalancer.records
    assert (record.outcome, record.policy, record.time) == ("applied", policy, 50.0)
    assert np.array_equal(runner.slot_of_expert_LE, wanted.slot_of_expert_LE)
    assert record.experts_moved == rebalancer.totals.experts_moved == wanted.experts_moved > 0
    assert record.imbalance_before == imbalance_L(SKEWED_LSE, before_LE, RANKS).mean()
    assert record.imbalance_after == imbalance_L(SKEWED_LSE, wanted.slot_of_expert_LE, RANKS).mean()
    assert record.imbalance_after < record.imbalance_before
    assert record.remote_share_before == remote_share(SKEWED_LSE, before_LE, RANKS)
    assert record.remote_share_after == remote_share(SKEWED_LSE, wanted.slot_of_expert_LE, RANKS)
    assert record.far_share_before == record.far_share_after == 0  # one node
    assert rebalancer.totals.last_rebalance == 51.0
    moves = sum(len(moves.src_slot) for _, moves in runner.migrated)
    assert rebalancer.totals.bytes_moved == moves * runner.expert_bytes


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
    assert rebalancer.totals.bytes_moved == LAYERS * 400


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
    assert rebalancer.totals.experts_moved == 0
    assert rebalancer.totals.last_rebalance is None
    assert rebalancer.totals.bytes_moved == len(done.src_slot) * runner.expert_bytes

    runner.migrations_left = None
    steps(rebalancer, runner, 3)
    ticks(rebalancer, 3)
    assert [record.outcome for record in rebalancer.records] == ["failed", "applied"]


@pytest.mark.parametrize("error", [TypeError("a bug"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED"), MemoryError()])
def test_migration_error_before_the_first_round_changes_nothing(monkeypatch, error):
    def fail(layer, moves):
        raise error

    rebalancer, runner = loop(policy="eplb")
    before_LE = runner.slot_of_expert_LE
    with monkeypatch.context() as patch:
        patch.setattr(runner, "migrate", fail)
        steps(rebalancer, runner, 3)
        ticks(rebalancer, 2)
    assert np.array_equal(runner.slot_of_expert_LE, before_LE)
    steps(rebalancer, runner, 3)
    ticks(rebalancer, 3)
    assert [record.outcome for record in rebalancer.records] == ["failed", "applied"]


def test_lost_devices_end_the_loop(monkeypatch):
    def fail(layer, moves):
        raise DevicesLost("gone")

    rebalancer, runner = loop(policy="eplb")
    monkeypatch.setattr(runner, "migrate", fail)
    steps(rebalancer, runner, 3)
    ticks(rebalancer, 1)
    with pytest.raises(DevicesLost):
        ticks(rebalancer, 1)


def test_failed_decision_keeps_the_placement_and_the_loop_goes_on():
    calls = iter(range(2))
    rebalancer, runner = loop(policy_function=lambda *arguments: propose(*arguments) if next(calls) else 1 // 0)
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


def test_own_policy_decides_and_is_named_in_the_record():
    def swap_first(counts_LSE, slot_of_expert_LE, mesh, config):
        new_slot_LE = slot_of_expert_LE.copy()
        new_slot_LE[:, [0, -1]] = slot_of_expert_LE[:, [-1, 0]]
        return Proposal(new_slot_LE, 1.0, 0.5, 2 * LAYERS, True, "because")

    rebalancer, runner = loop(policy_function=swap_first)
    steps(rebalancer, runner, 3)
    ticks(rebalancer, 2)
    (record,) = rebalancer.records
    assert (record.policy, record.outcome, record.reason) == ("swap_first", "applied", "because")
    assert runner.slot_of_expert_LE.tolist() == [[7, 1, 2, 3, 4, 5, 6, 0]] * LAYERS


def test_proposal_that_is_no_permutation_fails_and_moves_nothing():
    def twice(counts_LSE, slot_of_expert_LE, mesh, config):
        return Proposal(0 * slot_of_expert_LE, 1.0, 0.5, 1, True, "wrong")

    rebalancer, runner = loop(policy_function=twice)
    steps(rebalancer, runner, 3)
    ticks(rebalancer, 2)
    assert rebalancer.records[0].outcome == "failed"
    assert not runner.migrated


def test_apply_placement_brings_a_runner_to_any_placement():
    runner = FakeRunner(MODEL, CONFIG)
    wanted_LE = np.random.default_rng(0).permuted(runner.slot_of_expert_LE, axis=1)
    apply_placement(runner, wanted_LE, CONFIG)
    assert np.array_equal(runner.slot_of_expert_LE, wanted_LE)
    runner.migrated.clear()
    apply_placement(runner, wanted_LE, CONFIG)
    assert not runner.migrated


def test_static_never_moves_and_records_are_bounded():
    rebalancer, runner = loop(policy="static", window_steps=1)
    steps(rebalancer, runner, 2 * rebalance.RECORDS + 10)
    assert len(rebalancer.records) == rebalance.RECORDS
    assert {record.outcome for record in rebalancer.records} == {"kept"}
    assert not runner.migrated


# -- pressure -----------------------------------------------------------------


def test_pressure_covers_the_steps_since_the_last_call():
    rebalancer, runner = loop(policy="static")
    assert rebalancer.traffic.pressure_S().tolist() == [0.0, 0.0]
    steps(rebalancer, runner, 2)
    # Expert tokens per step and layer. Ranks 0 and 1, of engine 0, hold experts 0 to 3.
    halves = SKEWED_LSE[0].sum(axis=0).reshape(2, 4).sum(axis=1)
    assert np.allclose(rebalancer.traffic.pressure_S(), halves / MODEL.experts_per_token)
    steps(rebalancer, runner, 4, 2 * SKEWED_LSE)
    assert np.allclose(rebalancer.traffic.pressure_S(), 2 * halves / MODEL.experts_per_token)
    assert rebalancer.traffic.pressure_S().tolist() == [0.0, 0.0]


def test_pressure_max_uses_the_fullest_rank():
    config = replace(CONFIG, dispatch=DispatchConfig(expert_pressure="max"))
    runner = FakeRunner(MODEL, config)
    rebalancer = Rebalancer(MODEL, config, runner, AtOnce())
    steps(rebalancer, runner, 2)
    # Each rank holds two experts. The fullest rank has 170 + 3 tokens a step in engine 0, 7 + 130 in engine 1.
    assert np.allclose(rebalancer.traffic.pressure_S(), np.array([173, 137]) / MODEL.experts_per_token)


def test_pressure_uses_the_current_placement():
    rebalancer, runner = loop(policy="eplb")
    steps(rebalancer, runner, 3)
    ticks(rebalancer, 2)
    rebalancer.traffic.pressure_S()
    steps(rebalancer, runner, 1)
    expected_S = expert_pressure_S(SKEWED_LSE, runner.slot_of_expert_LE, RANKS, 1, MODEL.experts_per_token)
    assert np.allclose(rebalancer.traffic.pressure_S(), expected_S)


# -- totals -------------------------------------------------------------------


def test_achieved_gain_is_measured_on_the_next_window():
    rebalancer, runner = loop(policy="eplb")
    before_LE = runner.slot_of_expert_LE
    steps(rebalancer, runner, 3)
    ticks(rebalancer, 1)
    record = rebalancer.records[-1]
    predicted = 1 - record.cost_after / record.cost_before
    assert rebalancer.totals.predicted_gain is None
    ticks(rebalancer, 1)
    assert rebalancer.totals.predicted_gain == predicted > 0
    assert rebalancer.totals.achieved_gain is None

    after_LE, other_LSE = runner.slot_of_expert_LE, SKEWED_LSE[:, ::-1] + 7
    steps(rebalancer, runner, 3, other_LSE)
    ticks(rebalancer, 1)
    apart_SR = 1 - np.kron(np.eye(2), np.ones(2))
    costs = [
        placement_cost_L(other_LSE, slots_LE, before_LE, apart_SR, rebalancer._config.placement).mean()
        for slots_LE in (before_LE, after_LE)
    ]
    assert rebalancer.totals.achieved_gain == pytest.approx(1 - costs[1] / costs[0])
    assert rebalancer.totals.achieved_gain != pytest.approx(predicted)


def test_achieved_gain_equals_predicted_gain_on_equal_traffic():
    rebalancer, runner = loop(smoothing=0.0)
    steps(rebalancer, runner, 3)
    ticks(rebalancer, 2)
    assert runner.migrated
    steps(rebalancer, runner, 3)
    ticks(rebalancer, 1)
    assert rebalancer.totals.achieved_gain == pytest.approx(rebalancer.totals.predicted_gain)


def test_achieved_gain_is_reset_by_each_applied_placement():
    def swap(counts_LSE, slot_of_expert_LE, mesh, config):
        new_slot_LE = slot_of_expert_LE.copy()
        new_slot_LE[:, [0, -1]] = slot_of_expert_LE[:, [-1, 0]]
        return Proposal(new_slot_LE, 1.0, 0.5, 2 * LAYERS, True, "because")

    rebalancer, runner = loop(policy_function=swap)
    steps(rebalancer, runner, 3)
    ticks(rebalancer, 2)
    steps(rebalancer, runner, 3)
    ticks(rebalancer, 1)
    first = rebalancer.totals.achieved_gain
    ticks(rebalancer, 1)
    assert (rebalancer.totals.applied, rebalancer.totals.achieved_gain) == (2, None)
    steps(rebalancer, runner, 3)
    ticks(rebalancer, 1)
    second = rebalancer.totals.achieved_gain
    assert first is not None and second is not None and first * second < 0  # there, and back again


def test_empty_window_measures_no_gain():
    rebalancer, runner = loop(policy="eplb")
    steps(rebalancer, runner, 3)
    ticks(rebalancer, 2)
    for _ in range(2):
        rebalancer.ask()
        ticks(rebalancer, 2)
    assert rebalancer.totals.achieved_gain is None
    steps(rebalancer, runner, 3)
    ticks(rebalancer, 2)
    assert rebalancer.totals.achieved_gain == pytest.approx(rebalancer.totals.predicted_gain)


def test_every_decision_is_counted_once():
    outcomes = iter(["fail", "move", "move", "keep"])

    def scripted(counts_LSE, slot_of_expert_LE, mesh, config):
        outcome = next(outcomes)
        if outcome == "fail":
            raise ValueError("no")
        new_slot_LE = slot_of_expert_LE.copy()
        new_slot_LE[:, [0, -1]] = slot_of_expert_LE[:, [-1, 0]]
        return Proposal(new_slot_LE, 1.0, 0.5, 2 * LAYERS, outcome == "move", outcome)

    rebalancer, runner = loop(policy_function=scripted)
    runner.migrations_left = LAYERS + 1  # the second migration fails in its second round
    for _ in range(4):
        steps(rebalancer, runner, 3)
        ticks(rebalancer, 3)
    totals = rebalancer.totals
    assert (totals.kept, totals.applied, totals.failed_decisions, totals.failed_migrations) == (1, 1, 1, 1)
    assert totals.decision_seconds > 0 and totals.migration_seconds > 0
    assert totals.predicted_gain == 0.5
