"""Reading HLO: lines as XLA writes them for H100, and what they say."""

import pytest

from gimbal_jax.planning.hlo import (
    Collective,
    HloArray,
    collectives,
    donated_parameters,
    instructions,
    mosaic_kernels,
    parameters,
)

HEADER = (
    "HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias), {1}: (2, {}, must-alias) }, "
    "entry_computation_layout={(f32[8]{0}, bf16[4,2]{1,0}, /*index=2*/s32[])->(bf16[4,2]{1,0}, s32[])}\n"
)
PAIRS = ((0, 1), (2, 3))
ACROSS = ((0, 2), (1, 3))
ALL = ((0, 1, 2, 3),)


def program(*lines: str) -> str:
    return HEADER + "\n%body (p: f32[8]) -> f32[8] {\n" + "".join(f"  {line}\n" for line in lines) + "}\n"


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("mesh['dp'=2,'tp'=2] {'tp'}", PAIRS),
        ("mesh['dp'=2,'tp'=2] {'dp'}", ACROSS),
        ("mesh['axis_0'=2,'axis_1'=2] {'axis_0','axis_1'}", ALL),
        ("[2,2]<=[4]", PAIRS),
        ("[2,2]<=[2,2]T(1,0)", ACROSS),
        ("{{0,2},{1,3}}", ACROSS),
    ],
)
def test_groups_in_every_form_that_hlo_has(groups, expected):
    hlo = program(f"%a.1 = bf16[4,2]{{1,0}} all-gather(%x), channel_id=1, replica_groups={groups}, dimensions={{0}}")
    assert collectives(hlo) == (Collective("all-gather", HloArray("bf16", (4, 2)), expected),)


def test_a_collective_on_two_arrays_counts_twice_and_a_start_by_its_done():
    hlo = program(
        "%a = (s32[8]{0}, bf16[4,2]{1,0}) all-gather(%x, %y), replica_groups=[1,4]<=[4], dimensions={0}",
        "%s = ((bf16[2]{0}), bf16[8]{0}) all-gather-start(%z), replica_groups=[1,4]<=[4], dimensions={0}",
        "%d = bf16[8]{0} all-gather-done(%s)",
        "%p = f32[4]{0} collective-permute(%w), source_target_pairs={{0,1},{1,0}}",
    )
    assert [(one.kind, str(one.result)) for one in collectives(hlo)] == [
        ("all-gather", "s32[8]"),
        ("all-gather", "bf16[4,2]"),
        ("all-gather", "bf16[8]"),
        ("collective-permute", "f32[4]"),
    ]


def test_what_stands_inside_a_fusion_writes_no_memory():
    fused = "%fused (p: f32[8]) -> f32[8] {\n  ROOT %big = f32[1000]{0} broadcast(%p), dimensions={0}\n}\n"
    hlo = HEADER + fused + program("%f = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused").removeprefix(HEADER)
    assert [(one.name, one.opcode, one.results) for one in instructions(hlo)] == [
        ("f", "fusion", (HloArray("f32", (8,)),))
    ]


def test_the_header_tells_parameters_and_which_are_donated():
    assert donated_parameters(program()) == {1, 2}
    assert [str(array) for array in parameters(program())] == ["f32[8]", "bf16[4,2]", "s32[]"]
    assert [array.nbytes for array in parameters(program())] == [32, 16, 4]
    assert donated_parameters("HloModule jit_step, entry_computation_layout={()->()}\n") == frozenset()


def test_kernels_count_by_name_wherever_they_stand():
    call = 'custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/shard_map/%s/mpmd_map"}'
    hlo = program(
        f"%a = f32[8]{{0}} custom-call(%x), {call % 'route'}",
        f"%b = f32[8]{{0}} custom-call(%x), {call % 'attend'}, backend_config={{mosaic_gpu.wgmma}}",
        '%c = f32[8]{0} custom-call(%x), custom_call_target="__cublas$gemm"',
    )
    assert mosaic_kernels(hlo) == {"route": 1, "attend+wgmma": 1}


def test_a_collective_without_groups_is_an_error():
    with pytest.raises(ValueError, match="no replica groups"):
        collectives(program("%a = f32[8]{0} all-reduce(%x), to_apply=%add"))
