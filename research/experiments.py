"""Which runs each figure of the paper needs, and each study of ours, as lists of tasks.

Systems are compared in *settings*: a cost set, a shape of lengths, a load, a seed. No two settings of one cost set
share a seed, so that their routers and requests differ and what comes out of them is independent; all systems of one
setting share all of it.
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
"""Where topics, exchange and peers are looked at as well."""
GATHER_SYSTEMS = ("vllm", "gimbal", "gimbal+")
PERSISTENCES = (0.0, 0.5, 1.0)
BETAS = (0.0025, 0.03, 0.1, 0.2, 0.5, 1.0, 10.0)
GAMMAS = (0.01, 0.1, 0.3, 1.0)
BUDGETS = (512, 1024, 2048, 4096, 8192)
MOST_SEEDS = 100
"""Of each setting; runs with fewer seeds are among those with more, so that more can be added."""
MULTIHOST_MODEL = "Qwen3-235B-A22B"
MULTIHOST_MESHES = {
    MeshConfig(dp=4, tp=4, nodes=2): (8.0, 827_520),
    MeshConfig(dp=16, tp=4, nodes=8): (16.0, 1_051_200),
}
"""Of the study of several nodes, 8 H100s each: requests per second, and an engine's KV cache by `gimbal mesh plan`. At
twice the rate 8 nodes are full: in every step some engine computes a prompt, and all wait for it."""
MULTIHOST_SHARE = 0.04
"""Requests for each request per second, of the number in other runs."""
MULTIHOST_PERSISTENCES = (0.0, 0.5, 0.8, 1.0)
MULTIHOST_VARIANTS: Mapping[str, tuple[str, Exchange]] = {
    **{policy: (multihost_system(policy), "sparse") for policy in MULTIHOST_PLACEMENTS},
    "static, all-gather": (multihost_system("static"), "gather"),
}
"""System and exchange by name; the first is what others are compared with."""
DISPATCH_SYSTEMS = ("static", "gimbal_static", "late_static")


@dataclass(frozen=True)
class Scope:
    """How much is run."""

    requests: int = 1000
    seeds: int = 3
    shapes: Sequence[Lengths] = SHAPES
    rates: Sequence[float] = (2.0, 2.5, 3.0, 3.5, 4.0)
    """Requests per second, as in the paper; for costs that are like the paper's."""
    shares: Sequence[float] = (0.5, 0.65, 0.8, 0.95)
    """Of capacity, for measured costs: they are far faster than what the paper shows."""
    calibration_windows: int = 8


def quick(scope: Scope) -> Scope:
    """A look at everything in a few minutes."""
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
    """The grid of a cost set, under the system ``REFERENCE``: all of it for ``paper_like``; for ``graph`` all of the
    first shape, and the ends of the loads of the others; for the rest the first shape's ends and middle.
    """
    first, *others = scope.shapes
    loads = scope.rates if costs.startswith("paper") else scope.shares
    outer, middle = (loads[0], loads[-1]), loads[len(loads) // 2]
    of_first = loads if costs in VARIED else dict.fromkeys((outer[0], middle, outer[1]))
    of_others = {"paper_like": loads, "graph": outer}.get(costs, ())
    grid = [(first, load) for load in of_first] + [(shape, load) for shape in others for load in of_others]
    return list(_settings(scope, costs, grid))


def ends(scope: Scope, costs: CostSet) -> list[Scenario]:
    """The least and the highest load of the first shape."""
    found = of_first_shape(scope, settings(scope, costs))
    return at_load("lowest", found) + at_load("highest", found)


def of_first_shape(scope: Scope, found: Iterable[Scenario]) -> list[Scenario]:
    """The scenarios with its lengths."""
    return [scenario for scenario in found if scenario.workload.lengths == scope.shapes[0]]


def with_topics(scope: Scope, costs: CostSet) -> list[Scenario]:
    """The ends, where sources keep their topics: only then do sources differ, so only then can locality pay."""
    return [replace(s, routing=RoutingConfig(persistence=0.8)) for s in ends(scope, costs)]


def with_gather(scope: Scope, costs: CostSet) -> list[Scenario]:
    """The ends, where every rank gets all tokens, wherever experts are."""
    return [replace(s, exchange="gather") for s in ends(scope, costs)]


def experiments(scope: Scope) -> dict[str, Experiment]:
    """All figures and studies by name; they share runs."""
    grids = {costs: settings(scope, costs) for costs in COST_SETS}
    everywhere = [s for grid in grids.values() for s in grid]
    first = [s for costs in VARIED for s in of_first_shape(scope, grids[costs])]
    topics = [s for costs in VARIED for s in with_topics(scope, costs)]
    gather = [s for costs in VARIED for s in with_gather(scope, costs)]
    return {
        "2": Experiment("prompt lengths; one long and one short request", tuple(single_requests())),
        "4": Experiment("experts' load, and what leaves its source", tuple(map(ExpertCounts, static_runs(scope)))),
        "6": Experiment("weights of placement beside the exact solver", tuple(calibration_points(scope))),
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
    """Each setting under each of the systems."""
    systems = tuple(systems)
    return tuple(replace(scenario, system=system) for scenario in found for system in systems)


def study_share(scope: Scope) -> float:
    """Load of studies that look at one only: the second highest."""
    return scope.shares[-2]


def static_runs(scope: Scope) -> list[Scenario]:
    """Runs under the contiguous placement, by persistence of topics: for the traffic alone, so at any costs."""
    base = Scenario("static", "graph", WorkloadConfig(requests=scope.requests, rate=20.0))
    return [replace(base, routing=RoutingConfig(persistence=p)) for p in PERSISTENCES]


def late_settings(scope: Scope) -> list[Scenario]:
    """Long prompts at all loads, and the first shape at its two highest."""
    grid: list[tuple[Lengths, float]] = [("azure-code", share) for share in scope.shares]
    grid += [(scope.shapes[0], share) for share in scope.shares[-2:]]
    return list(_settings(scope, "graph", grid))


def budget_settings(scope: Scope) -> list[Scenario]:
    """Step budgets under long prompts. All budgets of a seed get the same requests."""
    found = list(_settings(scope, "graph", [("azure-code", study_share(scope))]))
    return [replace(scenario, token_budget=budget) for scenario in found for budget in BUDGETS]


def queue_settings(scope: Scope) -> list[Scenario]:
    """Long prompts at the two highest loads; some of these runs are the study of late binding's too."""
    return list(_settings(scope, "graph", [("azure-code", share) for share in scope.shares[-2:]]))


def queue_systems() -> list[str]:
    """Two dispatchers, each with the queue ``sjf_aging`` and those of ``QUEUES``; experts stay."""
    return [f"{name}_static{queue}" for name in ("gimbal", "late") for queue in ("", *(f"_{q}" for q in QUEUES))]


def replica_settings(scope: Scope) -> list[Scenario]:
    """Runs whose steps are studied."""
    return [replace(s, system="static") for s in _settings(scope, "graph", [(scope.shapes[0], study_share(scope))])]


def multihost_runs(scope: Scope) -> tuple[Scenario, ...]:
    """Each setting under each variant, those of one setting together."""
    return tuple(as_variant(name, [s])[0] for s in multihost_settings(scope) for name in MULTIHOST_VARIANTS)


def as_variant(name: str, found: Iterable[Scenario]) -> list[Scenario]:
    """Settings under one of ``MULTIHOST_VARIANTS``."""
    system, exchange = MULTIHOST_VARIANTS[name]
    return [replace(scenario, system=system, exchange=exchange) for scenario in found]


def multihost_settings(scope: Scope) -> list[Scenario]:
    """Several nodes, by how far topics keep to sources; what does not is a mix of topics at every source.

    The rate is given: all requests at once, to find the capacity of 64 GPUs, would take longer than the study.
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
    """A fashion of topics, so that experts are unevenly loaded for as long as it lasts."""
    found = _settings(scope, "graph", [(scope.shapes[0], study_share(scope))])
    return [replace(scenario, routing=RoutingConfig(trend=0.8)) for scenario in found]


def pressure_systems() -> list[list[str]]:
    """Weights of pressure where experts stay and where they move."""
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
    """A short and a long request, at all costs."""
    return [OneRequest(tokens, costs) for costs in COST_SETS for tokens in (200, 2000)]


def calibration_points(scope: Scope) -> list[CalibrationPoint]:
    """Weights beside the exact solver."""
    return [CalibrationPoint(beta, gamma, scope.calibration_windows) for beta in BETAS for gamma in GAMMAS]


def in_order(found: Iterable[Experiment], scope: Scope) -> list[Task]:
    """Their tasks without repetition: first what is no run, then the first shape on the paper's testbed, then the rest.

    Systems of one setting come one after the other, since they share a router.
    """
    default = Scenario()

    def place(task: Task) -> tuple[int, ...]:
        if not isinstance(task, Scenario):
            return (0,)
        usual = (task.mesh, task.routing, task.exchange) == (default.mesh, default.routing, default.exchange)
        first = usual and task.workload.lengths == scope.shapes[0]
        return 1 if first else 2, COST_SETS.index(task.costs), not usual, task.seed

    return sorted(dict.fromkeys(task for experiment in found for task in experiment.tasks), key=place)
