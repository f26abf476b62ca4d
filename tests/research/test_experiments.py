"""Runs of the figures and studies."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from gimbal_jax.model.hf_config import PRESETS
from gimbal_jax.planning.hardware import gpu_kinds
from gimbal_jax.planning.plan import MeshPlan, PlanRequest, plan_mesh
from gimbal_jax.simulation.routing import RoutingConfig
from gimbal_jax.simulation.scenario import Scenario
from gimbal_jax.simulation.systems import SYSTEMS
from gimbal_jax.simulation.workload import SHAPES
from research.claims import CLAIMS
from research.comparison import load_of, under_system
from research.experiments import (
    COMPARED,
    COST_SETS,
    MULTIHOST_MESHES,
    MULTIHOST_MODEL,
    Scope,
    budget_settings,
    experiments,
    in_order,
    multihost_runs,
    multihost_settings,
    queue_systems,
    quick,
    settings,
    with_gather,
    with_topics,
)
from research.tasks import Replicas, at_capacity, capacity_task

SCOPE = Scope()


def test_the_whole_reproduction_has_a_limited_number_of_runs():
    assert 1000 < len(in_order(experiments(SCOPE).values(), SCOPE)) < 1800
    small = quick(SCOPE)
    assert len(in_order(experiments(small).values(), small)) < 300


def test_the_grid_is_the_paper_s():
    found = settings(SCOPE, "paper_like")
    assert Counter((s.workload.lengths, s.workload.rate) for s in found) == {
        (shape, rate): 3 for shape in SHAPES for rate in (2.0, 2.5, 3.0, 3.5, 4.0)
    }
    assert all(s.workload.requests == 1000 and s.share_of_capacity is None for s in found)
    assert {load_of(s) for s in settings(SCOPE, "graph") if s.workload.lengths == "random"} == {0.5, 0.65, 0.8, 0.95}


@pytest.mark.parametrize("costs", COST_SETS)
def test_settings_of_a_cost_set_share_no_seed(costs):
    found = settings(SCOPE, costs)
    assert len({s.seed for s in found}) == len(found)


def test_settings_of_more_seeds_contain_those_of_fewer():
    one, three = (in_order(experiments(Scope(seeds=seeds)).values(), SCOPE) for seeds in (1, 3))
    assert set(one) < set(three)
    capacities = [{capacity_task(task) for task in tasks} for tasks in (one, three)]
    assert capacities[0] == capacities[1]


def test_systems_of_a_setting_share_all_other_fields():
    runs = [task for task in experiments(SCOPE)["9"].tasks if isinstance(task, Scenario)]
    by_setting = Counter(replace(run, system="vllm") for run in runs)
    everywhere = {setting for costs in COST_SETS for setting in settings(SCOPE, costs)}
    assert set(by_setting) == everywhere and min(by_setting.values()) == len(COMPARED)


def test_every_claim_has_its_runs_in_the_paper_s_grid():
    runs = {task for experiment in experiments(SCOPE).values() for task in experiment.tasks}
    grid = settings(SCOPE, "paper_like")
    for claim in CLAIMS:
        assert runs.issuperset(under_system(claim.system, grid) + under_system(claim.baseline, grid)), claim


def test_the_paper_s_testbed_is_computed_first():
    tasks = in_order(experiments(SCOPE).values(), SCOPE)
    assert len(set(tasks)) == len(tasks)
    runs = [task for task in tasks if isinstance(task, Scenario)]
    assert tasks[-len(runs) :] == runs
    usual = Scenario()
    first = [s for s in runs if (s.exchange, s.routing, s.mesh) == (usual.exchange, usual.routing, usual.mesh)]
    first = [s for s in first if s.workload.lengths == "random"]
    assert runs[: len(first)] == first
    changes = sum((a.costs, a.seed) != (b.costs, b.seed) for a, b in pairwise(first))
    assert changes < len({(s.costs, s.seed) for s in first})  # runs of one router are consecutive


def test_variants_change_one_thing():
    for costs in ("paper_like", "graph"):
        grid = settings(SCOPE, costs)
        assert {replace(s, exchange="sparse") for s in with_gather(SCOPE, costs)} <= set(grid)
        assert {replace(s, routing=Scenario().routing) for s in with_topics(SCOPE, costs)} <= set(grid)
        assert len({load_of(s) for s in with_topics(SCOPE, costs)}) == 2


def test_systems_of_a_study_share_their_settings():
    budgets = budget_settings(SCOPE)
    assert len({replace(s, token_budget=1) for s in budgets}) == len({s.seed for s in budgets}) == 3
    multihost = multihost_settings(SCOPE)
    assert {(s.mesh.nodes, s.mesh.ranks) for s in multihost} == {(2, 16), (8, 64)}
    assert len({replace(s, routing=RoutingConfig()) for s in multihost}) == 2 * SCOPE.seeds, "persistence alone"
    runs = multihost_runs(SCOPE)
    assert len(set(runs)) == len(runs) == 6 * len(multihost) and runs[0] == multihost[0]
    assert {s.exchange for s in runs if s.system != "multihost_static"} == {"sparse"}
    assert queue_systems()[0] == "gimbal_static" and all(name in SYSTEMS for name in queue_systems())


@pytest.mark.parametrize("mesh", MULTIHOST_MESHES, ids=lambda mesh: f"{mesh.nodes} nodes")
def test_kv_caches_of_several_nodes_are_as_planned(mesh):
    rate, kv_tokens = MULTIHOST_MESHES[mesh]
    request = PlanRequest(PRESETS[MULTIHOST_MODEL], gpu_kinds()["H100"], mesh.ranks)
    plan = plan_mesh(request, replace(mesh, nodes=1))
    assert isinstance(plan, MeshPlan) and plan.kv_tokens == kv_tokens
    assert rate > 0 and mesh.ranks_per_node == 8


def test_compared_runs_share_one_capacity():
    runs = [task for experiment in experiments(SCOPE).values() for task in experiment.tasks]
    shared = [task for task in runs if capacity_task(task) is not None]
    assert len({capacity_task(task) for task in shared}) < 15
    base = Scenario("gimbal", share_of_capacity=0.8, seed=7, token_budget=512)
    assert capacity_task(base) == capacity_task(Scenario("vllm", share_of_capacity=0.5))
    assert capacity_task(base) != capacity_task(replace(base, exchange="gather"))
    assert capacity_task(Scenario()) is None


def test_a_share_of_capacity_is_replaced_by_a_rate():
    base = Scenario("gimbal", share_of_capacity=0.8)
    at_rate = at_capacity(base, 50.0)
    assert isinstance(at_rate, Scenario)
    assert at_rate.workload.rate == 40.0 and at_rate.share_of_capacity is None
    assert replace(at_rate, share_of_capacity=0.8, workload=base.workload) == base
    assert at_capacity(Replicas(base), 50.0) == Replicas(at_rate)
    with pytest.raises(ValueError, match="must have a share of capacity"):
        at_capacity(Scenario(), 50.0)
