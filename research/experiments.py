"""Runs of each figure of the paper and of each study of ours, as lists of tasks.

Systems are compared in *settings*. A setting is a cost set, a shape of lengths, a load and a seed, and all systems are
run in it. No two settings of one cost set share a seed, so that their routers, requests and results are independent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from gimbal_jax.config import GPU_ENGINE, Exchange, MeshConfig
from gimbal_jax.simulation.cost_sets import PAPER_KV_TOKENS, CostSet
from gimbal_jax.simulation.routing import RoutingConfig
from gimbal_jax.simulation.scenario import KV_TOKENS, REFERENCE, Scenario
from gimbal_jax.simulation.systems import MULTIHOST_PLACEMENTS, PRESSURE_WEIGHTS, QUEUES, multihost_system
from gimbal_jax.simulation.workload import SHAPES, TRACES, Lengths, WorkloadConfig
from research.comparison import at_load
from research.tasks import CalibrationPoint, ExpertCounts, OneRequest, Replicas, Task

PAPER_SYSTEMS = ("vllm", "moetuner", "sem_moe", "gimbal")
ABLATION = ("vllm", "gimbal_dp", "gimbal_ep", "gimbal_no_collab", "gimbal", "gimbal+")
COMPARED = tuple(dict.fromkeys(PAPER_SYSTEMS + ABLATION))
CALIBRATION = ("gimbal", "gimbal_uncalibrated")
PEERS = ("vllm_0_33", "sglang")
COST_SETS: tuple[CostSet, ...] = ("paper_like", "graph", "paper_like_fixed", "eager")
VARIED: tuple[CostSet, ...] = ("paper_like", "graph")
"""Cost sets in which topics, exchange and peers are also studied."""
GATHER_SYSTEMS = ("vllm", "gimbal", "gimbal+")
PERSISTENCES = (0.0, 0.5, 1.0)
BETAS = (0.0025, 0.03, 0.1, 0.2, 0.5, 1.0, 10.0)
GAMMAS = (0.01, 0.1, 0.3, 1.0)
BUDGETS = (512, 1024, 2048, 4096, 8192)
MOST_SEEDS = 100
"""Most seeds of a setting. Runs with fewer seeds are a part of those with more, so seeds can be added later."""
MULTIHOST_MODEL = "Qwen3-235B-A22B"
MULTIHOST_MESHES = {
    MeshConfig(dp=4, tp=4, nodes=2): (8.0, 827_520),
    MeshConfig(dp=16, tp=4, nodes=8): (16.0, 1_051_200),
}
"""Requests per second and KV cache tokens of an engine (by `gimbal mesh plan`) on several nodes of 8 H100s.

At twice the rate, 8 nodes are full: in every step some engine computes a prompt, and all engines wait for it.
"""
MULTIHOST_SHARE = 0.04
"""Requests of a run for each request per second, relative to ``Scope.requests``."""
MULTIHOST_PERSISTENCES = (0.0, 0.5, 0.8, 1.0)
MULTIHOST_VARIANTS: Mapping[str, tuple[str, Exchange]] = {
    **{policy: (multihost_system(policy), "sparse") for policy in MULTIHOST_PLACEMENTS},
    "static, all-gather": (multihost_system("static"), "gather"),
}
"""System and exchange by name. The first one is the baseline of the others."""
DISPATCH_SYSTEMS = ("static", "gimbal_static", "late_static")


@dataclass(frozen=True)
class Scope:
    """Size of the experiments: requests, seeds, shapes, loads and calibration windows."""

    requests: int = 1000
    seeds: int = 3
    shapes: Sequence[Lengths] = SHAPES
    rates: Sequence[float] = (2.0, 2.5, 3.0, 3.5, 4.0)
    """Requests per second, as in the paper, for the ``paper_like`` cost sets."""
    shares: Sequence[float] = (0.5, 0.65, 0.8, 0.95)
    """Shares of capacity for the measured costs, which are far faster than the paper's testbed."""
    calibration_windows: int = 8


def quick(scope: Scope) -> Scope:
    """Return a scope that runs a part of every experiment, in a few minutes."""
    return replace(
        scope,
        requests=min(scope.requests, 200),
        seeds=1,
        shapes=scope.shapes[:1],
        rates=(scope.rates[0], scope.rates[-1]),
        shares=(scope.shares[0], scope.shares[-1]),
        calibration_windows=2,
    )


@dataclass(frozen=True)
class Experiment:
    """A figure or a study."""

    about: str
    tasks: tuple[Task, ...]


def settings(scope: Scope, costs: CostSet) -> list[Scenario]:
    """Return the grid of a cost set, under the system ``REFERENCE``.

    ``paper_like`` has all shapes and loads. ``graph`` has all loads of the first shape, and the lowest and highest of
    the other shapes. The other sets have the lowest, middle and highest load of the first shape.
    """
    first, *others = scope.shapes
    loads = scope.rates if costs.startswith("paper") else scope.shares
    outer, middle = (loads[0], loads[-1]), loads[len(loads) // 2]
    of_first = loads if costs in VARIED else dict.fromkeys((outer[0], middle, outer[1]))
    of_others = {"paper_like": loads, "graph": outer}.get(costs, ())
    grid = [(first, load) for load in of_first] + [(shape, load) for shape in others for load in of_others]
    return list(_settings(scope, costs, grid))


def ends(scope: Scope, costs: CostSet) -> list[Scenario]:
    """Return the settings of the first shape at the lowest and at the highest load."""
    found = of_first_shape(scope, settings(scope, costs))
    return at_load("lowest", found) + at_load("highest", found)


def of_first_shape(scope: Scope, found: Iterable[Scenario]) -> list[Scenario]:
    """Return the scenarios that have the lengths of the scope's first shape."""
    return [scenario for scenario in found if scenario.workload.lengths == scope.shapes[0]]


def with_topics(scope: Scope, costs: CostSet) -> list[Scenario]:
    """Return the ``ends`` with sources that keep their topics. Locality can only help if sources differ."""
    return [replace(s, routing=RoutingConfig(persistence=0.8)) for s in ends(scope, costs)]


def with_gather(scope: Scope, costs: CostSet) -> list[Scenario]:
    """Return the ``ends`` with all-gather, by which every rank gets all tokens independently of the placement."""
    return [replace(s, exchange="gather") for s in ends(scope, costs)]


def experiments(scope: Scope) -> dict[str, Experiment]:
    """Return all figures and studies by name. They share runs."""
    grids = {costs: settings(scope, costs) for costs in COST_SETS}
    everywhere = [s for grid in grids.values() for s in grid]
    first = [s for costs in VARIED for s in of_first_shape(scope, grids[costs])]
    topics = [s for costs in VARIED for s in with_topics(scope, costs)]
    gather = [s for costs in VARIED for s in with_gather(scope, costs)]
    return {
        "2": Experiment("prompt lengths; one long and one short request", tuple(single_requests())),
        "4": Experiment("load of experts, and remote tokens", tuple(map(ExpertCounts, static_runs(scope)))),
        "6": Experiment("placement weights compared with the exact solver", tuple(calibration_points(scope))),
        "9": Experiment("latency, TTFT, TPOT and P99 TTFT", under(COMPARED, everywhere) + under(PEERS, first)),
        "8": Experiment("gimbal calibrated and not", under(CALIBRATION, grids["paper_like"])),
        "10": Experiment("throughput", under(PAPER_SYSTEMS, everywhere)),
        "11": Experiment("ablation", under(ABLATION, everywhere)),
        "12": Experiment("running requests, KV use, gap of prompt throughput", under(ABLATION, everywhere)),
        "topics": Experiment("sources that keep their topics", under(COMPARED, topics)),
        "exchange": Experiment("all-gather in place of all-to-all", under(GATHER_SYSTEMS, gather)),
        "late": Experiment("late binding against dispatch at arrival", under(DISPATCH_SYSTEMS, late_settings(scope))),
        "budget": Experiment("tokens of a step", under(("static", "late_static"), budget_settings(scope))),
        "queues": Experiment("queue orders", under(queue_systems(), queue_settings(scope))),
        "replicas": Experiment("redundant experts", tuple(map(Replicas, replica_settings(scope)))),
        "multihost": Experiment("Qwen3-235B-A22B on several nodes", multihost_runs(scope)),
        "pressure": Experiment("expert pressure in dispatch", under(chain(*pressure_systems()), fashionable(scope))),
    }


def under(systems: Iterable[str], found: Iterable[Scenario]) -> tuple[Scenario, ...]:
    """Return each setting under each of the systems."""
    systems = tuple(systems)
    return tuple(replace(scenario, system=system) for scenario in found for system in systems)


def study_share(scope: Scope) -> float:
    """Return the load of studies of a single load: the second highest."""
    return scope.shares[-2]


def static_runs(scope: Scope) -> list[Scenario]:
    """Return runs under the contiguous placement by persistence of topics, for traffic only: costs do not matter."""
    base = Scenario("static", "graph", WorkloadConfig(requests=scope.requests, rate=20.0))
    return [replace(base, routing=RoutingConfig(persistence=p)) for p in PERSISTENCES]


def late_settings(scope: Scope) -> list[Scenario]:
    """Return settings of long prompts at all loads, and of the first shape at its two highest loads."""
    grid: list[tuple[Lengths, float]] = [("azure-code", share) for share in scope.shares]
    grid += [(scope.shapes[0], share) for share in scope.shares[-2:]]
    return list(_settings(scope, "graph", grid))


def budget_settings(scope: Scope) -> list[Scenario]:
    """Return settings of long prompts by step budget. All budgets of a seed have the same requests."""
    found = list(_settings(scope, "graph", [("azure-code", study_share(scope))]))
    return [replace(scenario, token_budget=budget) for scenario in found for budget in BUDGETS]


def queue_settings(scope: Scope) -> list[Scenario]:
    """Return settings of long prompts at the two highest loads. The late-binding study shares some of these runs."""
    return list(_settings(scope, "graph", [("azure-code", share) for share in scope.shares[-2:]]))


def queue_systems() -> list[str]:
    """Return two dispatchers, each with the queue ``sjf_aging`` and those of ``QUEUES``, without moves of experts."""
    return [f"{name}_static{queue}" for name in ("gimbal", "late") for queue in ("", *(f"_{q}" for q in QUEUES))]


def replica_settings(scope: Scope) -> list[Scenario]:
    """Return the runs whose steps are priced with redundant experts."""
    return [replace(s, system="static") for s in _settings(scope, "graph", [(scope.shapes[0], study_share(scope))])]


def multihost_runs(scope: Scope) -> tuple[Scenario, ...]:
    """Return each setting under each variant. Runs of one setting are consecutive."""
    return tuple(as_variant(name, [s])[0] for s in multihost_settings(scope) for name in MULTIHOST_VARIANTS)


def as_variant(name: str, found: Iterable[Scenario]) -> list[Scenario]:
    """Return the settings under one of ``MULTIHOST_VARIANTS``."""
    system, exchange = MULTIHOST_VARIANTS[name]
    return [replace(scenario, system=system, exchange=exchange) for scenario in found]


def multihost_settings(scope: Scope) -> list[Scenario]:
    """Return settings of several nodes by persistence of topics.

    Requests that do not have the topic of their source have a random one. The rate is fixed, because a run that finds
    the capacity of 64 GPUs would take longer than the study.
    """
    return [
        Scenario(
            multihost_system("static"),
            "graph",
            WorkloadConfig("azure-conv", round(MULTIHOST_SHARE * scope.requests * rate), rate),
            routing=RoutingConfig(persistence=persistence),
            model=MULTIHOST_MODEL,
            mesh=mesh,
            max_rows=GPU_ENGINE.max_rows,
            kv_tokens=kv_tokens,
            seed=seed,
        )
        for mesh, (rate, kv_tokens) in MULTIHOST_MESHES.items()
        for seed in range(scope.seeds)
        for persistence in MULTIHOST_PERSISTENCES
    ]


def fashionable(scope: Scope) -> list[Scenario]:
    """Return settings with one fashionable topic at a time, which loads experts unevenly for as long as it lasts."""
    found = _settings(scope, "graph", [(scope.shapes[0], study_share(scope))])
    return [replace(scenario, routing=RoutingConfig(trend=0.8)) for scenario in found]


def pressure_systems() -> list[list[str]]:
    """Return systems by weight of expert pressure: first those whose experts stay, then those whose experts move."""
    return [[f"{name}_moe_{weight:g}" for weight in PRESSURE_WEIGHTS] for name in ("gimbal_static", "gimbal")]


def _settings(scope: Scope, costs: CostSet, grid: Iterable[tuple[Lengths, float]]) -> Iterator[Scenario]:
    by_share = not costs.startswith("paper")
    loads = list(scope.shares if by_share else scope.rates)
    for lengths, load in grid:
        workload = WorkloadConfig(lengths, scope.requests, WorkloadConfig.rate if by_share else load)
        number = (*SHAPES, *TRACES).index(lengths) * len(loads) + loads.index(load)
        for seed in range(number * MOST_SEEDS, number * MOST_SEEDS + scope.seeds):
            share = load if by_share else None
            kv_tokens = KV_TOKENS if by_share else PAPER_KV_TOKENS
            yield Scenario(REFERENCE, costs, workload, share, kv_tokens=kv_tokens, seed=seed)


def single_requests() -> list[OneRequest]:
    """Return a short and a long request for each cost set."""
    return [OneRequest(tokens, costs) for costs in COST_SETS for tokens in (200, 2000)]


def calibration_points(scope: Scope) -> list[CalibrationPoint]:
    """Return the placement weights that are compared with the exact solver."""
    return [CalibrationPoint(beta, gamma, scope.calibration_windows) for beta in BETAS for gamma in GAMMAS]


def in_order(found: Iterable[Experiment], scope: Scope) -> list[Task]:
    """Return the tasks of the experiments without repetition, in the order in which they are computed.

    Tasks that are not runs come first, then the first shape on the paper's testbed, then the rest. Systems of one
    setting are consecutive, because they share a router.
    """
    default = Scenario()

    def place(task: Task) -> tuple[int, ...]:
        if not isinstance(task, Scenario):
            return (0,)
        usual = (task.mesh, task.routing, task.exchange) == (default.mesh, default.routing, default.exchange)
        first = usual and task.workload.lengths == scope.shapes[0]
        return 1 if first else 2, COST_SETS.index(task.costs), not usual, task.seed

    return sorted(dict.fromkeys(task for experiment in found for task in experiment.tasks), key=place)
