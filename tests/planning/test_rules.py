"""The design's collectives and kernels by hand, and findings on programs made of text; real ones: tests/cuda."""

from dataclasses import replace
from pathlib import Path

import pytest

from gimbal_jax.config import EngineConfig, MeshConfig, ServerConfig
from gimbal_jax.model.hf_config import PRESETS
from gimbal_jax.planning import rules
from gimbal_jax.planning.compiled import Program, bucket_kinds, shallow
from gimbal_jax.planning.hardware import gpu_kinds
from gimbal_jax.planning.rules import RULES, Subject, mesh_groups, step_collectives, step_kernels

MODEL = shallow(PRESETS["Qwen3-30B-A3B"], 2)
ENGINE = EngineConfig(page_size=64, num_pages=100, max_rows=128, token_budget=8192, tile=64)
PAIRS, ALL = ((0, 1), (2, 3)), ((0, 1, 2, 3),)


def config(dp: int, tp: int, exchange="gather") -> ServerConfig:
    return ServerConfig(MeshConfig(dp, tp), replace(ENGINE, exchange=exchange))


def step_census(model, config, bucket) -> rules.Census:
    return rules.expected_census(step_collectives(model, config, bucket), config.mesh)


def test_bucket_kinds_are_the_largest():
    assert bucket_kinds(config(2, 2)) == {"decode": (128, 0), "mixed": (128, 128)}


def test_groups_follow_rank_order():
    alone = ((0,), (1,), (2,), (3,))
    assert mesh_groups(MeshConfig(2, 2)) == {"all": ALL, "tp": PAIRS, "dp": ((0, 2), (1, 3))}
    assert mesh_groups(MeshConfig(1, 4)) == {"all": ALL, "tp": ALL, "dp": alone}
    assert mesh_groups(MeshConfig(4, 1)) == {"all": ALL, "tp": alone, "dp": ALL}


def test_decode_at_2_x_2_by_hand():
    """128 tokens an engine, 64 of them each rank's own; hidden 2,048, vocabulary 151,936, 128 experts, 8 choices."""
    gather = {
        ("all-reduce", "bf16", 128 * 2048, PAIRS): 3,  # embedding, and attention of two layers
        ("all-gather", "bf16", 128 * 2048, PAIRS): 2,  # MoE outputs of both
        ("all-gather", "f32", 128 * 151936, PAIRS): 1,  # logits
        ("all-gather", "s32", 4 * (3 * 64 * 8 + 128), ALL): 2,
        ("all-gather", "bf16", 256 * 2048, ALL): 2,
        ("reduce-scatter", "bf16", 64 * 2048, ALL): 2,
    }
    assert step_census(MODEL, config(2, 2), (128, 0)) == gather
    sparse = {key: times for key, times in gather.items() if key[3] == PAIRS} | {
        ("all-gather", "s32", 4 * (128 + 4), ALL): 2,
        ("ragged-all-to-all", "bf16", 256 * 2048, ALL): 4,  # out, and back: as many rows
        ("ragged-all-to-all", "s32", 256 * 16, ALL): 2,
    }
    assert step_census(MODEL, config(2, 2, "sparse"), (128, 0)) == sparse


def test_over_nodes_the_leading_host_gets_tokens_and_log_probabilities_of_all_engines():
    one = config(2, 2)
    two = replace(one, mesh=replace(one.mesh, nodes=2))
    between = ((0, 2), (1, 3))
    decode = {("all-gather", "s32", 256, between): 1, ("all-gather", "f32", 256, between): 1}
    decode |= {("all-gather", kind, 256 * 20, between): 1 for kind in ("s32", "f32")}  # the likeliest 20
    assert step_census(MODEL, two, (128, 0)) - step_census(MODEL, one, (128, 0)) == decode
    prompts = {("all-gather", "f32", 8192, PAIRS): 1, ("all-gather", "f32", 16384, between): 1}
    for kind in ("s32", "f32"):
        prompts |= {("all-gather", kind, 8192 * 20, PAIRS): 1, ("all-gather", kind, 16384 * 20, between): 1}
    assert step_census(MODEL, two, (128, 128)) - step_census(MODEL, one, (128, 128)) == decode | prompts


def test_engines_of_one_device_only_exchange():
    assert {groups for *_, groups in step_census(MODEL, config(4, 1), (128, 0))} == {ALL}
    assert step_census(MODEL, config(1, 1), (128, 0)) == {}


@pytest.mark.parametrize(("bucket", "attention"), [((128, 0), 2), ((128, 128), 4)])
def test_kernels_by_hand(bucket, attention):
    kernels = {"route_and_count+wgmma": 2, "paged_attention+wgmma": attention, "ragged_dot_sm90+wgmma": 4}
    assert step_kernels(MODEL, bucket) == kernels


def program(*lines: str, layout: str = "()->()", donated: frozenset[int] = frozenset(), **sizes: int) -> Program:
    text = f"HloModule jit_step, entry_computation_layout={{{layout}}}\n\nENTRY %main (p: f32[]) -> f32[] {{\n"
    plain = dict.fromkeys(("argument_bytes", "output_bytes", "aliased_bytes", "temporary_bytes"), 0) | sizes
    return Program(
        text + "".join(f"  {line}\n" for line in lines) + "}\n", **plain, donated=donated, layers=2, compile_s=0
    )


def findings(of: Program) -> dict[str, str]:
    subject = Subject(of, MODEL, config(2, 2), gpu_kinds()["H100"], utilisation=0.9, bucket=(128, 0))
    return {one.rule: one.detail for one in rules.findings(subject)}


def test_an_empty_program_lacks_collectives_and_kernels_and_nothing_else():
    assert set(findings(program())) == {"collectives", "kernels"}


@pytest.mark.parametrize(
    ("rule", "faulty"),
    [
        ("memory", program(argument_bytes=77 * 10**9)),
        ("temporaries", program(temporary_bytes=10**9)),
        ("collectives", program()),
        ("kernels", program()),
        ("in place", program(donated=frozenset({0}))),
        ("in place", program("%c = bf16[9000000]{0} copy(%p)", layout="(bf16[9000000]{0})->()")),
        ("sparse experts", program("%b = bf16[1280,32,2048]{2,1,0} fusion(%p), kind=kLoop, calls=%f")),
        ("paged context", program("%k = bf16[128,4096,2,128]{3,2,1,0} fusion(%p), kind=kLoop, calls=%f")),
        (
            "experts stay",
            program("%g = bf16[128,2048,1536]{2,1,0} all-gather(%p), replica_groups=[1,4]<=[4], dimensions={0}"),
        ),
    ],
)
def test_each_fault_breaks_its_rule(rule, faulty):
    assert rule in RULES and rule in findings(faulty)


def test_a_result_of_a_parameter_s_size_is_its_update():
    pages = "bf16[1,9000,64,2,128]{4,3,2,1,0}"
    update = program("%u = bf16[576000,2,128]{2,1,0} fusion(%p), kind=kLoop, calls=%f", layout=f"({pages})->()")
    assert "paged context" not in findings(update)
    assert "paged context" in findings(replace(update, hlo=update.hlo.replace(f"({pages})", "()")))


def test_a_round_of_moves_that_gathers_is_found():
    gathers = program("%g = bf16[128,2048,1536]{2,1,0} all-gather(%p), replica_groups=[1,4]<=[4], dimensions={0}")
    subject = Subject(gathers, MODEL, config(2, 2), gpu_kinds()["H100"], utilisation=0.9, bucket=None)
    details = [str(one) for one in rules.findings(subject)]
    assert any("1 all-gather of 402653184 bf16" in detail and "not in the design" in detail for detail in details)
    assert sum("1 all-to-all" in detail and "missing" in detail for detail in details) == 2


def test_a_missing_collective_is_explained():
    assert "missing (" in findings(program())["collectives"]
    assert all(one.why for one in step_collectives(MODEL, config(2, 2, "sparse"), (128, 128)))


def test_the_document_lists_the_rules():
    table = (Path(__file__).parents[2] / "docs" / "cuda.md").read_text().split("| rule | meaning |\n|---|---|\n")[1]
    rows = [line.strip("| ").split(" | ") for line in table.partition("\n\n")[0].splitlines()]
    # The last one is a promise of scripts/cuda_check.py about one mesh, not a rule of programs.
    assert rows[-1][0] == "kv pool"
    assert rows[:-1] == [[name, rule.text] for name, rule in RULES.items()]
