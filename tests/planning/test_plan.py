"""Plans: every mesh is there, what fits is what the arithmetic says, and the recommendation follows its rule."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.measure import Measurement

from gimbal_jax.config import GPU_ENGINE, MeshConfig, PlacementConfig, ServerConfig
from gimbal_jax.model.hf_config import PRESETS
from gimbal_jax.model.memory import device_bytes, kv_bytes_per_token, step_bytes
from gimbal_jax.planning.check import server_config
from gimbal_jax.planning.cost import decode_seconds, prefill_seconds
from gimbal_jax.planning.hardware import gpu_kinds, link_kinds
from gimbal_jax.planning.plan import (
    CLOSE,
    MeshPlan,
    PlanRequest,
    Rejected,
    plan_mesh,
    plan_meshes,
    recommended,
    serve_commands,
    smallest_count,
)
from gimbal_jax.planning.plan_report import heading, nothing_fits, plan_json, plan_lines, plan_table
from gimbal_jax.planning.rules import kv_tokens
from gimbal_jax.serving.runtime.batch import step_buckets

QWEN, LARGE = PRESETS["Qwen3-30B-A3B"], PRESETS["Qwen3-235B-A22B"]
H100, H200 = gpu_kinds()["H100"], gpu_kinds()["H200"]
IB400 = link_kinds()["ib400"]
TWO_NODES = PlanRequest(LARGE, H100, 16, nodes=2, link=IB400)


def fitting(request: PlanRequest) -> list[MeshPlan]:
    return [plan for plan in plan_meshes(request) if isinstance(plan, MeshPlan)]


def test_what_the_kernels_do_not_take_is_refused():
    plan = plan_mesh(PlanRequest(replace(QWEN, dtype="float32", weights_dtype="float32"), H100, 4), MeshConfig(2, 2))
    assert isinstance(plan, Rejected)
    assert "dtype is float32; the attention kernel takes bfloat16" in plan.reason
    a100 = plan_mesh(
        PlanRequest(replace(QWEN, dtype="float32", weights_dtype="float32"), gpu_kinds()["A100-80"], 8),
        MeshConfig(2, 4),
    )
    assert isinstance(a100, MeshPlan)  # where XLA's forms run, there is no such limit


def test_every_factorisation_is_listed():
    plans = plan_meshes(PlanRequest(QWEN, H100, 12))
    assert [(plan.mesh.dp, plan.mesh.tp) for plan in plans] == [(12, 1), (6, 2), (4, 3), (3, 4), (2, 6), (1, 12)]
    assert all(isinstance(plan, Rejected) and "num_experts = 128" in plan.reason for plan in plans)


def test_the_paper_s_testbed_holds_95_percent_of_a_million_tokens_per_engine():
    plan = plan_mesh(PlanRequest(QWEN, H100, 4), MeshConfig(2, 2))
    assert isinstance(plan, MeshPlan)
    assert plan.kv_tokens > 950_000
    assert plan.concurrent == 2 * (plan.kv_tokens // 2000)
    # By hand: what 90 % of 84.9 GB leave beside the fixed part, at 49,152 bytes a token on each GPU.
    left = int(0.9 * 84_942_979_072) - plan.memory.fixed
    assert plan.kv_tokens == left // (64 * 49_152) * 64


@pytest.mark.parametrize(
    ("changes", "mesh", "rule"),
    [
        ({"num_heads": 12}, MeshConfig(1, 8), "num_attention_heads = 12 must be divisible by tp = 8"),
        ({"num_kv_heads": 6, "num_heads": 24}, MeshConfig(1, 4), "num_key_value_heads = 6 and tp = 4"),
        ({"num_experts": 60}, MeshConfig(2, 4), "num_experts = 60 must be divisible by dp * tp = 8"),
        (
            {"num_heads": 66, "num_kv_heads": 3, "num_experts": 129, "vocab_size": 3000},
            MeshConfig(1, 3),
            "tile must be",
        ),
    ],
)
def test_a_mesh_that_breaks_a_rule_says_which(changes, mesh, rule):
    plan = plan_mesh(PlanRequest(replace(QWEN, **changes), H100, mesh.ranks), mesh)
    assert isinstance(plan, Rejected)
    assert plan.reason.startswith(rule)
    assert plan.missing_bytes == 0


def test_what_does_not_fit_says_by_how_much():
    request = PlanRequest(LARGE, H100, 4)
    plan = plan_mesh(request, MeshConfig(1, 4))
    assert isinstance(plan, Rejected)
    bucket = step_buckets(GPU_ENGINE, 4)[-1]
    needed = device_bytes(LARGE, ServerConfig(MeshConfig(1, 4), GPU_ENGINE), bucket)
    assert plan.missing_bytes == needed.least - request.budget
    # With just so much more per GPU it fits.
    roomy = replace(H100, memory_bytes=H100.memory_bytes + round(plan.missing_bytes / request.utilisation) + 1)
    assert isinstance(plan_mesh(replace(request, gpu=roomy), MeshConfig(1, 4)), MeshPlan)


def test_fewest_gpus_that_fit():
    assert smallest_count(PlanRequest(LARGE, H100, 4)) == (8, 1)
    assert not fitting(PlanRequest(LARGE, H100, 4)) and fitting(PlanRequest(LARGE, H100, 8))
    assert smallest_count(PlanRequest(replace(LARGE, num_layers=5000, moe_layers=tuple(range(5000))), H100, 1)) is None


@given(
    name=st.sampled_from(sorted(PRESETS)),
    kind=st.sampled_from(sorted(gpu_kinds())),
    count=st.sampled_from([1, 2, 4, 5, 8, 10, 16, 32]),
    page_size=st.sampled_from([16, 64, 128]),
    utilisation=st.floats(0.5, 1.0),
)
def test_pools_fill_the_budget_to_less_than_a_page(name, kind, count, page_size, utilisation):
    engine = replace(GPU_ENGINE, page_size=page_size)
    request = PlanRequest(PRESETS[name], gpu_kinds()[kind], count, engine, utilisation)
    for plan in fitting(request):
        page = page_size * kv_bytes_per_token(request.model, plan.mesh.tp)
        used = plan.memory.fixed + plan.kv_tokens // page_size * page
        assert used <= utilisation * request.gpu.memory_bytes < used + page + 1


def test_gpus_before_hopper_run_the_xla_forms():
    for kind in ("A100-80", "H100"):
        gpu = gpu_kinds()[kind]
        plan = plan_mesh(PlanRequest(QWEN, gpu, 4), MeshConfig(2, 2))
        bucket = step_buckets(GPU_ENGINE, 2)[-1]
        assert isinstance(plan, MeshPlan)
        assert plan.memory.step == step_bytes(QWEN, MeshConfig(2, 2), GPU_ENGINE, bucket, gpu.backend)


def test_the_rate_is_that_of_prompts_and_outputs_in_turn():
    request = PlanRequest(QWEN, H100, 4, request_tokens=1500, output_tokens=300)
    plan = plan_mesh(request, MeshConfig(2, 2))
    assert isinstance(plan, MeshPlan)
    mesh = MeshConfig(2, 2)
    assert plan.prefill_seconds == prefill_seconds(QWEN, mesh, H100, "gather", 8192, 1200)
    assert plan.decode_requests == 128
    assert plan.decode_seconds == decode_seconds(QWEN, mesh, H100, "gather", 128, 1500)
    # 128 requests: so many prefill steps, and 300 decode steps of all of them.
    seconds = 128 * 1200 / 8192 * plan.prefill_seconds + 300 * plan.decode_seconds
    assert plan.requests_per_second == pytest.approx(128 / seconds)


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("kind", sorted(gpu_kinds()))
def test_the_recommended_mesh_is_close_to_the_best_rate_and_holds_most_among_those(kind, count):
    plans = fitting(PlanRequest(QWEN, gpu_kinds()[kind], count))
    best = recommended(plans)
    assert best is not None
    least = (1 - CLOSE) * max(plan.requests_per_second for plan in plans)
    assert best.requests_per_second >= least
    assert all(p.concurrent <= best.concurrent for p in plans if p.requests_per_second >= least)


def test_a_slow_link_speaks_against_tensor_parallelism():
    slow = replace(H100, link_bandwidth=H100.link_bandwidth / 20)
    chosen = recommended(plan_meshes(PlanRequest(QWEN, slow, 4)))
    assert chosen is not None and chosen.mesh == MeshConfig(4, 1)


def test_a_request_must_fit_its_own_limits():
    for tokens, output in [(200, 200), (5000, 100)]:
        with pytest.raises(ValueError, match="request_tokens must be above output_tokens"):
            PlanRequest(QWEN, H100, 4, request_tokens=tokens, output_tokens=output)
    with pytest.raises(ValueError, match="token_budget must be at least"):
        PlanRequest(QWEN, H100, 4, replace(GPU_ENGINE, token_budget=100))


def test_json_says_what_the_plans_say():
    request = PlanRequest(LARGE, H200, 8)
    plans = plan_meshes(request)
    found = plan_json("model", request, plans)
    assert [plan["kv_tokens"] for plan in found["plans"]] == [plan.kv_tokens for plan in fitting(request)]
    best = recommended(plans)
    assert best is not None and found["recommended"] == {"dp": best.mesh.dp, "tp": best.mesh.tp, "nodes": 1}


def test_the_command_has_every_setting_of_the_plan():
    request = PlanRequest(QWEN, H100, 4, replace(GPU_ENGINE, exchange="sparse"), utilisation=0.8)
    (words,) = serve_commands("folder", request, MeshConfig(2, 2))
    assert " ".join(words) == (
        "gimbal serve folder --dp 2 --tp 2 --dtype bfloat16 --max-model-len 4096 --page-size 64 --max-rows 128 "
        "--token-budget 8192 --tile 64 --exchange sparse --memory-utilisation 0.8"
    )


def test_on_several_nodes_every_process_has_a_command():
    commands = serve_commands("folder", TWO_NODES, MeshConfig(4, 4, 2))
    (alone,) = serve_commands("folder", TWO_NODES, MeshConfig(4, 4))
    for process, words in enumerate(commands):
        assert words[: len(alone)] == alone
        together = "--coordinator HOST_OF_PROCESS_0:PORT --secret-file SECRET_FILE --trusted-network on "
        together += "--processes 2 --process"
        assert " ".join(words[len(alone) :]) == f"{together} {process}"
    assert len(commands) == 2


def test_engines_lie_within_nodes():
    plans = plan_meshes(TWO_NODES)
    assert [plan.mesh for plan in plans] == [MeshConfig(16 // tp, tp, 2) for tp in (1, 2, 4, 8, 16)]
    assert [isinstance(plan, MeshPlan) for plan in plans] == [True] * 4 + [False]
    crossing = plans[-1]
    assert isinstance(crossing, Rejected)
    assert crossing.reason == (
        "tp = 16 must divide the 8 GPUs of a node, so that engines lie within nodes: a GPU has 450 GB/s there, "
        "and 50 GB/s over ib400"
    )
    best = recommended(plans)
    assert best is not None and best.mesh.tp <= 8 and best.concurrent > 0
    # A node of 6: an engine of 4 would lie on two.
    twelve = PlanRequest(LARGE, H100, 12, nodes=2, link=IB400)
    assert "must divide the 6 GPUs of a node" in plan_mesh(twelve, MeshConfig(3, 4, 2)).reason  # type: ignore[union-attr]


def test_nodes_change_times_and_not_memory():
    slow = replace(TWO_NODES, link=link_kinds()["eth100"])
    one_node = {plan.mesh.tp: plan for plan in fitting(PlanRequest(LARGE, H100, 16))}
    for plan in fitting(slow):
        alone = one_node[plan.mesh.tp]
        assert (plan.memory, plan.kv_tokens, plan.concurrent) == (alone.memory, alone.kv_tokens, alone.concurrent)
        assert plan.requests_per_second < alone.requests_per_second
        # 4,096 numbers to the other node and back, and slot, weight and position of 8 experts.
        assert (plan.far_bytes, alone.far_bytes) == (2 * 8192 + 12 * 8, 0)


def test_only_times_need_a_link():
    config = server_config(PlanRequest(LARGE, H100, 16, nodes=2), MeshConfig(4, 4, 2))
    plan = plan_mesh(TWO_NODES, MeshConfig(4, 4, 2))
    assert isinstance(plan, MeshPlan) and kv_tokens(config) == plan.kv_tokens
    with pytest.raises(ValueError, match="link: several nodes need a network"):
        plan_meshes(PlanRequest(LARGE, H100, 16, nodes=2))
    with pytest.raises(ValueError, match="nodes must divide the 16 GPUs, not 3"):
        PlanRequest(LARGE, H100, 16, nodes=3)


def test_too_few_nodes_say_how_many_would_do():
    request = PlanRequest(LARGE, H100, 4, nodes=2, link=IB400)
    assert smallest_count(request) == (8, 4)
    assert smallest_count(replace(request, count=2)) == (16, 16)  # nodes of one GPU, which hold engines of one
    assert nothing_fits(request, plan_meshes(request)).startswith("no mesh of 2 nodes of 2 x H100 serves the model")
    assert nothing_fits(request, plan_meshes(request)).endswith("the fewest that would is 8 (4 nodes of 2)")


def test_more_gpus_than_a_node_has_are_counted_in_whole_nodes():
    request = PlanRequest(PRESETS["Qwen3-Coder-480B-A35B"], H100, 8)
    assert smallest_count(request) == (16, 2)
    assert nothing_fits(request, plan_meshes(request)).endswith("the fewest that would is 16 (2 nodes of 8)")
    # One node as large as the one asked for.
    assert smallest_count(replace(request, count=16)) == (16, 1)


def test_static_placement_reserves_no_migration_buffers():
    moving = PlanRequest(QWEN, H100, 4)
    static = replace(moving, placement=PlacementConfig("static"))
    mesh = MeshConfig(2, 2)
    plan, still = plan_mesh(moving, mesh), plan_mesh(static, mesh)
    assert isinstance(plan, MeshPlan) and isinstance(still, MeshPlan)
    assert (plan.memory.migration, still.memory.migration) == (16 * 9_437_184, 0)
    # The buffers are KV cache instead.
    gained = still.kv_tokens - plan.kv_tokens
    assert gained * kv_bytes_per_token(QWEN, 2) == pytest.approx(plan.memory.migration, abs=64 * 49_152)
    column = {str(column.header): list(column.cells) for column in plan_table(static, [still]).columns}
    assert column["moves\nGB"] == ["0.0"]
    assert "Migration: none under static placement" in "\n".join(plan_lines(static, [still]))
    assert serve_commands("folder", static, mesh)[0][-2:] == ["--placement", "static"]


def test_notes_name_the_batch_of_every_decode_step():
    request = PlanRequest(PRESETS["Qwen3-Coder-480B-A35B"], H100, 16, nodes=2, link=IB400)
    plans = plan_meshes(request)
    rows = {plan.mesh.tp: plan.decode_requests for plan in plans if isinstance(plan, MeshPlan)}
    assert rows == {4: 96, 8: 128}
    text = "\n".join(plan_lines(request, plans))
    assert "a decode step of 128 requests (96 at DP 4 x TP 4, as the caches hold)" in text
    assert "+1% decode time (96 requests, not 128)" in text


def test_meshes_that_break_the_same_rule_share_a_line():
    request = PlanRequest(QWEN, H100, 12)
    lines = plan_lines(request, plan_meshes(request))
    assert lines[0].startswith("DP 12 x TP 1, DP 6 x TP 2, DP 3 x TP 4: num_experts = 128 must be divisible")
    assert len(lines) < 6


@pytest.mark.parametrize(("name", "count", "nodes"), [("Qwen3-30B-A3B", 4, 1), ("Qwen3-235B-A22B", 64, 8)])
def test_the_table_fits_80_columns(name, count, nodes):
    request = PlanRequest(PRESETS[name], H200, count, nodes=nodes, link=IB400 if nodes > 1 else None)
    plans = plan_meshes(request)
    console = Console(width=200)
    assert Measurement.get(console, console.options, plan_table(request, plans)).maximum <= 80


def test_reports_show_what_crosses_nodes():
    plans = plan_meshes(TWO_NODES)
    assert heading("large", TWO_NODES).startswith("large (bfloat16) on 2 nodes of 8 x H100 over ib400, ")
    network = {str(column.header): list(column.cells) for column in plan_table(TWO_NODES, plans).columns}
    # 8,192 tokens in 94 layers, each once to the other node and back, over 16 cards.
    assert network["network\nMB/GPU"] == [f"{8192 * 94 * (2 * 8192 + 96) / 16 / 1e6:,.0f}"] * 4
    lines = "\n".join(plan_lines(TWO_NODES, plans))
    assert "Across nodes, of the exchange: 16.5 kB by gather (once to each other node), 54.2 kB by sparse" in lines
    found = plan_json("large", TWO_NODES, plans)
    assert (found["gpus"], found["nodes"], found["link"]["name"]) == (16, 2, "ib400")
    assert found["far_exchange_bytes"]["gather"] == found["plans"][0]["far_bytes"] == 2 * 8192 + 96
    alone = PlanRequest(LARGE, H100, 8)
    text = "\n".join([heading("large", alone), *plan_lines(alone, plan_meshes(alone))])
    assert "node" not in text and "network" not in str(
        [c.header for c in plan_table(alone, plan_meshes(alone)).columns]
    )
