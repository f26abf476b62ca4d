"""Steps on H100s: parts, order, lower bounds, and rejected inputs."""

from __future__ import annotations

import numpy as np
import pytest

from gimbal_jax.config import MeshConfig
from gimbal_jax.model.hf_config import PRESETS
from gimbal_jax.model.sizes import expert_bytes
from gimbal_jax.planning.cost import decode_seconds, prefill_seconds
from gimbal_jax.planning.hardware import gpu_kinds
from gimbal_jax.scheduler.migration import Round
from gimbal_jax.simulation.cost_sets import COST_SETS, GRAPH
from gimbal_jax.simulation.costs import h100_costs, launch_seconds
from gimbal_jax.simulation.work import EngineWork, StepWork
from research.fit import LATENCY_S, REARRANGEMENT_S, baseline_run, mean_rearrangement

MODEL, MESH = PRESETS["Qwen3-30B-A3B"], MeshConfig(dp=2, tp=2)
IDLE = EngineWork(np.zeros(0, np.int64), (), 0)


def decode(rows, context=1024) -> EngineWork:
    return EngineWork(np.full(rows, context), (), rows)


def prefill(*chunks) -> EngineWork:
    return EngineWork(np.zeros(0, np.int64), chunks, len(chunks))


def work(*engines, mesh=MESH, share_E=None) -> StepWork:
    """Choices drawn by ``share_E`` (even by default); every token of a source as often."""
    share_E = np.full(MODEL.num_experts, 1 / MODEL.num_experts) if share_E is None else share_E / share_E.sum()
    rng = np.random.default_rng(0)
    pairs_S = [engine.tokens * MODEL.experts_per_token for engine in engines]
    pairs_LSP = np.stack([rng.multinomial(n, share_E, size=MODEL.num_layers) for n in pairs_S], axis=1)
    return StepWork(engines, pairs_LSP, mesh.ranks)


def seconds(of_work, name="graph", exchange="sparse", mesh=MESH) -> float:
    return sum(h100_costs(name, MODEL, mesh, exchange).step_parts(of_work).values())


@pytest.mark.parametrize("exchange", ["gather", "sparse"])
@pytest.mark.parametrize("name", COST_SETS)
def test_steps_take_longer_than_the_data_sheet_allows(name, exchange):
    gpu = gpu_kinds()["H100"]
    for rows in (2, 8, 64, 256):
        floor = decode_seconds(MODEL, MESH, gpu, exchange, rows, 1024)
        assert seconds(work(decode(rows // 2), decode(rows // 2)), name, exchange) > floor
    for tokens in (256, 2048, 16384):
        floor = prefill_seconds(MODEL, MESH, gpu, exchange, tokens, tokens // 2)
        assert seconds(work(prefill((0, tokens // 2)), prefill((0, tokens // 2))), name, exchange) > floor


def test_more_work_takes_longer():
    steps = [work(decode(n), decode(n)) for n in (1, 8, 64, 256)]
    steps += [work(prefill((0, n)), prefill((0, n))) for n in (1024, 4096)]
    times = [seconds(step) for step in steps]
    assert times == sorted(times)


def test_an_idle_or_faster_engine_costs_nothing():
    costs = h100_costs("graph", MODEL, MESH, "gather")
    alone, beside = (costs.step_parts(work(decode(64), other)) for other in (IDLE, decode(2)))
    slowest = ("attention", "projections", "all_reduce", "all_gather", "small_kernels", "logits")
    assert [alone[part] for part in slowest] == [beside[part] for part in slowest]
    assert costs.step_parts(work(IDLE, decode(64))) == pytest.approx(alone, rel=0.02), "whichever engine it is"
    assert alone["exchange"] < beside["exchange"] and alone["experts"] < beside["experts"]
    assert costs.step_parts(work(IDLE, IDLE)).keys() == alone.keys()
    assert sum(costs.step_parts(work(IDLE, IDLE)).values()) == GRAPH.host_s


def test_a_fuller_rank_takes_longer():
    skewed_E = np.ones(MODEL.num_experts)
    skewed_E[:32] = 3.0  # rank 0 computes half of all pairs
    engines = prefill((0, 4096)), prefill((0, 4096))
    costs = h100_costs("graph", MODEL, MESH, "gather")
    even, skewed = (costs.step_parts(work(*engines, share_E=share)) for share in (None, skewed_E))
    assert skewed["experts"] > 1.2 * even["experts"]
    assert {part for part in even if even[part] != skewed[part]} == {"experts"}


def test_only_the_sparse_exchange_depends_on_the_placement():
    engines = prefill((0, 2048)), prefill((0, 2048))
    pairs_LSP = np.zeros((MODEL.num_layers, 2, MODEL.num_experts), np.int64)
    pairs_LSP[:, 0, :64] = pairs_LSP[:, 1, 64:] = 2048 * MODEL.experts_per_token // 64  # each source its own ranks
    at_home, away = (StepWork(engines, pairs, MESH.ranks) for pairs in (pairs_LSP, pairs_LSP[:, ::-1]))
    gather, sparse = h100_costs("graph", MODEL, MESH, "gather"), h100_costs("graph", MODEL, MESH, "sparse")
    assert gather.step_parts(at_home)["exchange"] == gather.step_parts(away)["exchange"]
    assert sparse.step_parts(at_home)["exchange"] < 0.8 * sparse.step_parts(away)["exchange"]


def test_chunks_of_a_prompt_cost_as_much_as_the_prompt_and_more_launches():
    costs = h100_costs("graph", MODEL, MESH, "gather")

    def attention(*chunks):
        return costs.step_parts(work(prefill(*chunks), IDLE))["attention"]

    launch = attention((0, 1))
    assert attention((0, 3000)) + attention((3000, 2000)) == pytest.approx(attention((0, 5000)) + launch)
    assert attention((0, 2048), (0, 2048)) == pytest.approx(48 * 82.896e-6), "as measured for batch 2"


def test_rows_of_different_contexts_cost_as_much_as_rows_of_their_mean():
    costs = h100_costs("graph", MODEL, MESH, "gather")
    mixed = EngineWork(np.array([101, 1901] * 16), (), 32)
    parts = [costs.step_parts(work(engine, IDLE))["attention"] for engine in (mixed, decode(32, 1001))]
    assert parts[0] == parts[1]
    assert costs.step_parts(work(decode(32, 1025), IDLE))["attention"] == pytest.approx(48 * 17.675e-6), "as measured"


def test_eager_steps_take_as_long_as_their_launches():
    least = COST_SETS["eager"].launches * MODEL.num_layers * launch_seconds()
    assert 15e-6 < launch_seconds() < 18e-6
    assert seconds(work(decode(1), IDLE), "eager") == pytest.approx(least)
    long = work(prefill((0, 8192)), prefill((0, 8192)))
    assert seconds(long, "eager") > 2 * least
    assert h100_costs("eager", MODEL, MESH, "sparse").step_parts(long)["launch"] == 0.0


def test_the_paper_like_sets_are_graph_stretched_and_graph_with_a_constant():
    step = work(decode(90), decode(90))
    assert seconds(step, "paper_like") == pytest.approx(COST_SETS["paper_like"].stretch * seconds(step))
    constant = MODEL.num_layers * COST_SETS["paper_like_fixed"].layer_s
    assert seconds(step, "paper_like_fixed") == pytest.approx(seconds(step) + constant)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper_like", "paper_like_fixed"])
def test_the_baseline_is_as_slow_as_the_paper_s(name):
    run = baseline_run(COST_SETS[name], seed=0)  # fitted over three seeds
    assert run.clients.e2e_mean_s == pytest.approx(LATENCY_S, rel=0.15)
    assert mean_rearrangement([run]) == pytest.approx(REARRANGEMENT_S, rel=0.1)


def test_moves_take_time_by_their_bytes_and_less_if_overlapped():
    swap = np.arange(MODEL.num_experts, dtype=np.int32)

    def seconds_of(src, dst, overlapped=False):
        moves = Round(np.array(src, np.int32), np.array(dst, np.int32), swap)
        return h100_costs("graph", MODEL, MESH, "sparse").migration_seconds(moves, overlapped)

    assert seconds_of([0, 1], [1, 0]) == GRAPH.round_s, "within a rank"
    one, two = seconds_of([0, 32], [32, 0]), seconds_of([0, 1, 32, 33], [32, 33, 0, 1])
    assert GRAPH.round_s < one < two < 2 * one
    beside = seconds_of([0, 1, 32, 33], [32, 33, 0, 1], overlapped=True)
    assert beside == pytest.approx(GRAPH.round_s + 2 * 2 * expert_bytes(MODEL) / 3.35e12), "two arrive on either rank"
    assert beside < two


def test_other_meshes_scale_and_count_as_extrapolated():
    for tp in (1, 4):
        mesh = MeshConfig(dp=4 // tp, tp=tp)
        costs = h100_costs("graph", MODEL, mesh, "gather")
        costs.step_parts(work(*[decode(8)] * mesh.dp, mesh=mesh))
        assert costs.outside[f"shapes of tp {tp}"] == 1
    step = work(*[decode(32)] * 4, mesh=MeshConfig(4, 2))
    assert seconds(step, mesh=MeshConfig(4, 2, nodes=2)) > seconds(step, mesh=MeshConfig(4, 2))


def test_prices_beyond_the_tables_are_counted():
    costs = h100_costs("graph", MODEL, MESH, "sparse")
    costs.step_parts(work(decode(64), decode(64)))
    assert not costs.outside
    costs.step_parts(work(prefill((0, 30000)), decode(1, 200_000)))
    assert {"prefill_attention", "decode_attention", "experts"} <= costs.outside.keys()


def test_work_without_a_price_is_rejected():
    with pytest.raises(ValueError, match=r"tp 8: .* 1, 2 and 4 only"):
        h100_costs("graph", MODEL, MeshConfig(1, 8), "gather")


def test_unknown_cost_sets_are_rejected():
    with pytest.raises(ValueError, match="cost set 'cheap': must be one of graph, eager"):
        h100_costs("cheap", MODEL, MESH, "gather")  # type: ignore[arg-type]
