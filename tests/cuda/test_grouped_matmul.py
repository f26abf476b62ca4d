"""The experts' feed-forward and the exchange, compiled for H100 at the sizes of Qwen3-30B-A3B on four GPUs."""

import re
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gimbal_jax.config import MeshConfig
from gimbal_jax.model.moe import moe_exchange
from gimbal_jax.model.sharding import RANKS, make_mesh
from gimbal_jax.pallas_kernels import grouped_ffn, grouped_ffn_reference, grouped_matmul, route_and_count
from gimbal_jax.planning.hardware import gpu_kinds
from gimbal_jax.planning.hlo import collectives
from gimbal_jax.planning.target import compile_only_devices
from tests.cuda.harness import compile_for_h100, shape

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, RANK_COUNT = 128, 8, 2048, 768, 4
SLOTS = EXPERTS // RANK_COUNT
GATE_UP, DOWN = (SLOTS, HIDDEN, 2 * INTERMEDIATE), (SLOTS, INTERMEDIATE, HIDDEN)
DECODE, PREFILL = 128, 16384


def operands(tokens: int, dtype=jnp.bfloat16) -> tuple[jax.ShapeDtypeStruct, ...]:
    return (
        shape(dtype, tokens, HIDDEN),
        shape(jnp.int32, tokens, TOP_K),
        shape(jnp.float32, tokens, TOP_K),
        shape(jnp.int32, SLOTS),
        shape(dtype, *GATE_UP),
        shape(dtype, *DOWN),
    )


def dense_products(hlo: str) -> list[str]:
    """Return the products, inside fusions too, with the weights of all slots, in any shape, as one operand."""
    elements: dict[str, int] = {}
    found = []
    for line in hlo.splitlines():
        match = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = [a-z]\w*\[([\d,]*)\]\S* ([\w\-]+)\((.*?)\)", line)
        if match:
            name, dims, opcode, arguments = match.groups()
            elements[name] = prod(int(n) for n in dims.split(",") if n)
            sizes = {elements.get(argument) for argument in re.findall(r"%([\w.\-]+)", arguments)}
            is_product = opcode == "dot" or re.search(r'custom_call_target="__(cublas|cudnn)', line)
            if is_product and sizes & {prod(GATE_UP), prod(DOWN)}:
                found.append(line.strip())
    return found


@pytest.mark.parametrize("tokens", [DECODE, PREFILL])
def test_both_products_are_hopper_kernels_within_the_stated_memory(tokens):
    compiled = compile_for_h100(partial(grouped_ffn, ranks=RANK_COUNT, backend="mosaic"), *operands(tokens))
    hlo = str(compiled.program.as_text())
    assert [kernel.name for kernel in compiled.kernels] == ["ragged_dot_sm90"] * 2
    assert all(kernel.spill_store_bytes == kernel.spill_load_bytes == 0 for kernel in compiled.kernels)
    assert dense_products(hlo) == []
    bound = grouped_matmul.temporary_bytes(tokens, TOP_K, SLOTS, HIDDEN, INTERMEDIATE, RANK_COUNT)
    assert compiled.temporary_bytes <= bound < 600e6
    assert (" while(" in hlo) == (tokens == PREFILL)
    print(f"{tokens} tokens: {compiled.temporary_bytes / 2**20:.0f} of {bound / 2**20:.0f} MiB; {compiled.kernels}")


@pytest.mark.parametrize("form", ["ragged_dot of XLA", "reference"])
def test_dense_forms_are_found(monkeypatch, form):
    if form == "reference":
        dense = grouped_ffn_reference
    else:
        monkeypatch.setattr(grouped_matmul, "_product_by_tokamax", jax.lax.ragged_dot)
        dense = partial(grouped_ffn, ranks=RANK_COUNT, backend="mosaic")
    assert len(dense_products(str(compile_for_h100(dense, *operands(DECODE)).program.as_text()))) == 2


def test_types_that_the_kernel_does_not_take_are_rejected():
    with pytest.raises(ValueError, match="float32, float32 and float32; the grouped product takes bfloat16"):
        compile_for_h100(partial(grouped_ffn, backend="mosaic"), *operands(DECODE, jnp.float32))


@pytest.mark.parametrize("form", ["gather", "sparse"])
def test_only_the_collectives_of_the_exchange(form):
    """On a 2 x 2 mesh, collectives carry tokens, routing and results only; the sparse ones are ragged."""
    tokens = PREFILL
    devices = compile_only_devices(gpu_kinds()["H100"], RANK_COUNT)
    mesh = make_mesh(MeshConfig(2, 2), devices)

    def on_rank(x, logits, valid, slot_of_expert, gate_up, down):
        routing = route_and_count(logits, valid, slot_of_expert, k=TOP_K, renormalise=True, ranks=RANK_COUNT)
        return moe_exchange(form, x, routing, slot_of_expert, gate_up, down, "mosaic")

    def sharded(dtype, spec, *dims):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

    own = P(RANKS)
    arguments = (
        sharded(jnp.bfloat16, own, tokens, HIDDEN),
        sharded(jnp.float32, own, tokens, EXPERTS),
        sharded(jnp.bool_, own, tokens),
        sharded(jnp.int32, P(), EXPERTS),
        sharded(jnp.bfloat16, own, EXPERTS, *GATE_UP[1:]),
        sharded(jnp.bfloat16, own, EXPERTS, *DOWN[1:]),
    )
    exchange = jax.shard_map(
        on_rank, mesh=mesh, in_specs=(own, own, own, P(), own, own), out_specs=own, check_vma=False
    )
    with jax.default_device(devices[0]):
        compiled = jax.jit(exchange).lower(*arguments).compile()
    t, routed = tokens // RANK_COUNT, 3 * TOP_K * tokens // RANK_COUNT + EXPERTS
    found = sorted(f"{collective.kind} {collective.result}" for collective in collectives(str(compiled.as_text())))
    assert (
        found
        == {
            "gather": [
                f"all-gather bf16[{tokens},{HIDDEN}]",
                f"all-gather s32[{RANK_COUNT},{routed}]",
                f"reduce-scatter bf16[{t},{HIDDEN}]",
            ],
            "sparse": [
                f"all-gather s32[{RANK_COUNT},{EXPERTS + RANK_COUNT}]",
                f"ragged-all-to-all bf16[{tokens},{HIDDEN}]",
                f"ragged-all-to-all bf16[{tokens},{HIDDEN}]",
                f"ragged-all-to-all s32[{tokens},{2 * TOP_K}]",
            ],
        }[form]
    )
