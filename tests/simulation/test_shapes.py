"""Prices of shapes that were not measured: they follow the rules, keep their order, and are counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gimbal_jax.config import Exchange, MeshConfig, ModelConfig
from gimbal_jax.model.hf_config import PRESETS
from gimbal_jax.model.sizes import expert_bytes
from gimbal_jax.planning.cost import decode_seconds, far_exchange_bytes, prefill_seconds
from gimbal_jax.planning.hardware import gpu_kinds
from gimbal_jax.scheduler.migration import Round
from gimbal_jax.simulation.cost_sets import DECISION_SECONDS, GRAPH
from gimbal_jax.simulation.costs import h100_costs, h100_kernels
from gimbal_jax.simulation.expert_kernel import fit_expert_kernel
from gimbal_jax.simulation.kernel_table import Grid
from gimbal_jax.simulation.shapes import DERIVED, MEASURED, TP, Shares, check_shapes, is_measured, shares
from gimbal_jax.simulation.work import EngineWork, StepWork

SMALL, LARGE = PRESETS[MEASURED], PRESETS["Qwen3-235B-A22B"]
MESH = MeshConfig(dp=4, tp=4, nodes=2)


def step(model: ModelConfig, rows: int, *chunks: tuple[int, int], mesh: MeshConfig = MESH) -> StepWork:
    """Return a step of equal work on every engine, with all experts equally likely."""
    engine = EngineWork(np.full(rows, 1025), chunks, rows + len(chunks))
    pairs = engine.tokens * model.experts_per_token
    shape = model.num_layers, mesh.dp
    share_E = np.full(model.num_experts, 1 / model.num_experts)
    return StepWork((engine,) * mesh.dp, np.random.default_rng(0).multinomial(pairs, share_E, size=shape), mesh.ranks)


def parts(model: ModelConfig, work: StepWork, mesh: MeshConfig = MESH) -> dict[str, float]:
    return dict(h100_costs("graph", model, mesh, "sparse").step_parts(work))


def test_the_measured_model_keeps_every_kernel_and_a_rank_of_tp_its_share():
    assert is_measured(SMALL) and not is_measured(LARGE)
    assert is_measured(replace(SMALL, num_layers=3, vocab_size=10)), "however many layers"
    assert shares(SMALL, TP) == Shares(1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert shares(SMALL, 4) == Shares(0.5, 0.5, 1.0, 0.5, 0.5, 1.0)
    kernel, same = fit_expert_kernel(), fit_expert_kernel().scaled(1.0, 1.0)
    for name in ("launch", "product", "handling"):
        np.testing.assert_array_equal(getattr(same, name).seconds, getattr(kernel, name).seconds)
    np.testing.assert_array_equal(same.product_table, kernel.product_table)


def test_shares_are_columns_times_depth_heads_and_weights():
    found = shares(LARGE, 4)  # 16 query heads and 1 KV head a rank, twice as deep, experts twice as wide
    assert found.qkv == (16 + 2) * 128 * 4096 / (2560 * 2048)
    assert found.output == 16 * 128 * 4096 / (2048 * 2048)
    assert (found.kv_heads, found.query_heads, found.depth, found.expert) == (0.5, 1.0, 2.0, 4.0)
    assert found.expert == expert_bytes(LARGE) / expert_bytes(SMALL)
    assert shares(replace(LARGE, num_kv_heads=2), 4).kv_heads == 0.5, "each rank holds a whole head"


def test_kernels_take_a_share_of_the_measured_time():
    measured, derived = (h100_kernels(shares(model, 4), 4) for model in (SMALL, LARGE))
    ratios = {"router": (2, 2), "head": (2, 2), "qkv_and_output": (3.6, 4.0)}
    for name, times in measured.items():
        if isinstance(times, Grid):
            np.testing.assert_array_equal(derived[name].seconds, times.seconds)
            continue
        low, high = ratios.get(name, (1, 1))
        ratio = derived[name].seconds / times.seconds
        assert (low <= ratio).all() and (ratio <= high).all(), name


def test_an_expert_four_times_as_large_takes_four_times_as_long_beyond_its_launch():
    kernel, large = fit_expert_kernel(), fit_expert_kernel().scaled(weights=4.0, token=2.0)
    launch = kernel.launch.at(np.array(0.0))
    for tokens in (16, 100, 5000):
        pairs_RP, tokens_R = np.full((1, 2), tokens), np.array([16])  # no handling for so few tokens
        before, after = (k.seconds(pairs_RP, tokens_R)[0] - launch for k in (kernel, large))
        assert after == pytest.approx(4 * before)
    more = kernel.seconds(pairs_RP, np.array([8192])) - kernel.seconds(pairs_RP, np.array([16]))
    assert large.seconds(pairs_RP, np.array([8192])) - large.seconds(pairs_RP, np.array([16])) == pytest.approx(
        2 * more
    )
    above = 2 * large.product_table.size
    assert large.products(np.array([above])) == pytest.approx(4 * kernel.products(np.array([above])))
    assert large.seconds(np.zeros((1, 2), np.int64), tokens_R) == 0.0


def test_more_work_takes_longer_and_no_step_is_faster_than_the_data_sheet():
    gpu = gpu_kinds()["H100"]
    mesh = MeshConfig(4, 4)
    times = []
    for rows in (1, 16, 64, 128):
        times.append(sum(parts(LARGE, step(LARGE, rows, mesh=mesh), mesh).values()))
        assert times[-1] > decode_seconds(LARGE, mesh, gpu, "sparse", 4 * rows, 1024)
    assert times == sorted(times)
    for tokens in (512, 8192):
        seconds = sum(parts(LARGE, step(LARGE, 0, (0, tokens), mesh=mesh), mesh).values())
        assert seconds > max(times[0], prefill_seconds(LARGE, mesh, gpu, "sparse", 4 * tokens, tokens))


@pytest.mark.parametrize("mesh", [MESH, MeshConfig(16, 4, nodes=8), MeshConfig(4, 4)])
def test_bytes_across_nodes_agree_with_the_plan(mesh):
    """The plan counts different experts of a token, and the simulator expects independent choices and sends counts."""
    work = step(LARGE, 0, (0, 2000), mesh=mesh)
    tokens = 2000 * mesh.dp * LARGE.num_layers
    tolerances: dict[Exchange, float] = {"sparse": 0.03, "gather": 0.01}
    for exchange, tolerance in tolerances.items():
        planned = far_exchange_bytes(LARGE, mesh.ranks, mesh.nodes, exchange)
        found = h100_costs("graph", LARGE, mesh, exchange).far_bytes(work) / tokens
        assert found == pytest.approx(planned, rel=tolerance), exchange
        assert (found > 0) == (mesh.nodes > 1)


def test_a_larger_model_of_as_many_layers_takes_longer_in_every_part_but_attention():
    large = replace(LARGE, num_layers=SMALL.num_layers, moe_layers=SMALL.moe_layers)
    for work in (step(SMALL, 64), step(SMALL, 8, (0, 2000))):
        small_parts, large_parts = parts(SMALL, work), parts(large, work)
        equal = {"host"}
        assert all(large_parts[part] > small_parts[part] for part in small_parts.keys() - equal - {"attention"})
        assert large_parts["attention"] >= small_parts["attention"], "KV heads are as many, query heads twice"
        assert large_parts["host"] == small_parts["host"]


def test_attention_scales_with_kv_heads_in_decode_and_query_heads_in_prefill():
    def attention(model: ModelConfig, tp: int, rows: int, *chunks: tuple[int, int]) -> float:
        mesh = MeshConfig(2, tp)
        return parts(model, step(model, rows, *chunks, mesh=mesh), mesh)["attention"] / model.num_layers

    assert attention(LARGE, 4, 64) == pytest.approx(attention(SMALL, 4, 64)) != pytest.approx(attention(SMALL, 2, 64))
    prompts = (0, 3000), (0, 500)
    of_as_many_query_heads = attention(SMALL, 2, 0, *prompts)
    assert attention(LARGE, 4, 0, *prompts) == pytest.approx(of_as_many_query_heads)
    assert attention(SMALL, 4, 0, *prompts) != pytest.approx(of_as_many_query_heads)


def test_every_price_of_a_rule_is_counted():
    costs = h100_costs("graph", LARGE, MESH, "sparse")
    costs.step_parts(step(LARGE, 8, (0, 64)))
    assert costs.outside.keys() >= DERIVED | {"experts", "shapes of tp 4"}
    assert costs.outside["experts"] == LARGE.num_layers * MESH.ranks
    assert costs.outside["qkv_and_output"] == costs.outside["decode_attention"] == MESH.dp
    mesh = MeshConfig(dp=4, tp=2)
    of_measured = h100_costs("graph", SMALL, mesh, "sparse")
    of_measured.step_parts(step(SMALL, 8, (0, 64), mesh=mesh))
    assert not of_measured.outside.keys() & (DERIVED | {"experts"})


def test_moves_scale_with_bytes_and_decisions_with_layers_and_ranks():
    rank = LARGE.num_experts // MESH.ranks
    swap = Round(np.array([0, rank], np.int32), np.array([rank, 0], np.int32), np.arange(128, dtype=np.int32))
    small, large = (h100_costs("graph", model, MESH, "sparse") for model in (SMALL, LARGE))
    assert large.migration_seconds(swap, False) > small.migration_seconds(swap, False) > GRAPH.round_s
    beside = [costs.migration_seconds(swap, True) - GRAPH.round_s for costs in (small, large)]
    assert beside[1] == pytest.approx(4 * beside[0])
    assert large.decision_seconds("gimbal") == pytest.approx(94 * 16 / (48 * 4) * DECISION_SECONDS["gimbal"])
    assert small.decision_seconds("gimbal") == DECISION_SECONDS["gimbal"]


@pytest.mark.parametrize(
    ("model", "mesh", "message"),
    [
        (PRESETS["Qwen3-Coder-480B-A35B"], MESH, "num_experts 160: .* for 128 only"),
        (replace(SMALL, dtype="float32"), MESH, "dtype float32"),
        (replace(SMALL, moe_layers=(0, 1)), MESH, "moe_layers"),
        (LARGE, MeshConfig(1, 8), "tp 8: .* 1, 2 and 4 only"),
        (SMALL, MeshConfig(2, 2, nodes=4), "nodes 4: must split 2 engines of 2 GPUs evenly"),
        (SMALL, MeshConfig(4, 2, nodes=3), "nodes 3: must split 4 engines of 2 GPUs evenly"),
    ],
)
def test_a_shape_without_a_rule_is_rejected(model, mesh, message):
    with pytest.raises(ValueError, match=message):
        check_shapes(model, mesh)
