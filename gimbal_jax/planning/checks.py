"""What a compiled program must be like, as rules with names. A broken rule gives a finding; nothing found is a pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gimbal_jax.config import MAX_LOGPROBS, MeshConfig, ModelConfig, ServerConfig
from gimbal_jax.model.inputs import Bucket, group_sizes, step_shape
from gimbal_jax.model.memory import device_bytes, migration_bytes
from gimbal_jax.model.prompt_logprobs import prompt_block
from gimbal_jax.model.sharding import kv_heads_in_cache
from gimbal_jax.pallas_kernels.grouped_matmul import chunk_rows
from gimbal_jax.planning.compiled import Program, shallow
from gimbal_jax.planning.gpus import Gpu
from gimbal_jax.planning.hlo import Groups, collectives, donated_parameters, instructions, mosaic_kernels, parameters

Census = Counter[tuple[str, str, int, Groups]]
"""How often devices exchange an array: (collective, dtype, elements on a device, groups)."""

NOT_WRITTEN = ("parameter", "bitcast", "tuple", "get-tuple-element", "while", "conditional", "constant")
"""Instructions whose result is memory that another one wrote."""


@dataclass(frozen=True)
class Finding:
    """A rule that a program breaks."""

    rule: str
    detail: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.detail}"


def step_findings(
    program: Program, model: ModelConfig, config: ServerConfig, gpu: Gpu, bucket: Bucket, utilisation: float
) -> list[Finding]:
    """Broken rules of a compiled step.

    ``memory`` weights, KV pool and temporaries fit into the share of the GPU that is ours; ``temporaries`` are no
    more than the KV pool was sized for; ``collectives`` are those of the design and no others; ``experts stay``: no
    rank gets another's expert weights; ``in place``: KV pages and counters are updated where they are; ``sparse
    experts``: no product of tokens with experts that they did not choose; ``paged context``: no dense copy of the
    decode rows' keys or values; ``kernels``: routing, attention and both products of each MoE layer
    run on the Hopper kernels, which use its tensor cores.
    """
    compiled = shallow(model, program.layers)
    mesh, engine = config.mesh, config.engine
    tokens, _ = group_sizes(*bucket, engine.tile)
    slots = model.num_experts // mesh.ranks
    chunk = chunk_rows(tokens * mesh.dp, model.experts_per_token, slots, mesh.ranks)
    kv_heads = kv_heads_in_cache(model, mesh.tp) // mesh.tp
    context = bucket[0] * engine.max_model_len * kv_heads * model.head_dim
    budget = device_bytes(model, config, bucket, gpu.backend).step.total

    found = [
        *_over("memory", "peak", program.peak_bytes, int(gpu.memory_bytes * utilisation)),
        *_over("temporaries", "they take", program.temporary_bytes, budget),
        *_census_findings(census(program), step_census(compiled, config, bucket)),
        *_travelling_experts(program, model),
        *_in_place(program),
        *_larger("sparse experts", program, chunk * slots * model.moe_intermediate_size),
        *_larger("paged context", program, context),
    ]
    kernels, wanted = mosaic_kernels(program.hlo), step_kernels(compiled, bucket)
    if kernels != wanted:
        found.append(Finding("kernels", f"{dict(kernels)}, want {dict(wanted)}"))
    return found


def migration_findings(program: Program, model: ModelConfig, config: ServerConfig) -> list[Finding]:
    """Broken rules of a compiled round of moves: see ``step_findings``; temporaries are the moved rows at most."""
    rows = config.mesh.ranks * config.placement.rows_per_pair
    moved = migration_bytes(model, config.mesh, config.placement.rows_per_pair)
    width = model.hidden_size * model.moe_intermediate_size
    everyone = mesh_groups(config.mesh)["all"]
    wanted: Census = Counter(
        {("all-to-all", "bf16", 2 * rows * width, everyone): 1, ("all-to-all", "bf16", rows * width, everyone): 1}
    )
    return [
        *_over("temporaries", "they take", program.temporary_bytes, moved),
        *_census_findings(census(program), wanted),
        *_in_place(program),
    ]


def mesh_groups(mesh: MeshConfig) -> dict[str, Groups]:
    """Devices that talk to each other: ``all`` of them, those of each engine (``tp``), or one of each (``dp``)."""
    ids = np.arange(mesh.ranks)

    def rows(grid: np.ndarray) -> Groups:
        return tuple(tuple(int(n) for n in row) for row in grid)

    of_engines = ids.reshape(mesh.dp, mesh.tp)
    return {"all": rows(ids[None]), "tp": rows(of_engines), "dp": rows(of_engines.T)}


def step_kernels(model: ModelConfig, bucket: Bucket) -> Counter[str]:
    """The Mosaic kernels that the design has for a step, as ``hlo.mosaic_kernels`` names them."""
    moe = len(model.moe_layers)
    attention = model.num_layers * sum(number > 0 for number in bucket)
    return Counter({"route_and_count+wgmma": moe, "paged_attention+wgmma": attention, "ragged_dot_sm90+wgmma": 2 * moe})


def step_census(model: ModelConfig, config: ServerConfig, bucket: Bucket) -> Census:
    """The collectives that the design has for a step.

    Within an engine, if it has several devices: the sum of the embedding's shards, of the attention output of each
    layer and of its dense feed-forward if it has one; the MoE outputs, which each device has for its own tokens; the
    logits, and where there are tiles those of a block of prompt tokens. Over all ranks, in each MoE layer: tokens and
    where they go, and results (see ``model.moe``). Over several nodes, what the leading host reads of all engines:
    tokens and log probabilities, of which those of prompts are first gathered within an engine.
    """
    mesh, groups = config.mesh, mesh_groups(config.mesh)
    shape = step_shape(config.engine, bucket)
    tokens, chosen = shape.tokens, shape.sequences
    own, ranks, k = tokens // mesh.tp, mesh.ranks, model.experts_per_token
    hidden, moe = model.hidden_size, len(model.moe_layers)
    wanted: Census = Counter()

    def add(times: int, kind: str, dtype: str, elements: int, over: str) -> None:
        if times and len(groups[over][0]) > 1:
            wanted[kind, dtype, elements, groups[over]] += times

    dense = model.num_layers - moe
    add(1 + model.num_layers + dense, "all-reduce", "bf16", tokens * hidden, "tp")
    add(moe, "all-gather", "bf16", tokens * hidden, "tp")
    add(1, "all-gather", "f32", chosen * model.vocab_size, "tp")
    if bucket[1]:
        block = prompt_block(bucket[1] * config.engine.tile, chosen, mesh.tp)
        add(1, "all-to-all", "f32", block * model.vocab_size // mesh.tp, "tp")
    if config.engine.exchange == "gather":
        add(moe, "all-gather", "s32", ranks * (3 * own * k + model.num_experts), "all")
        add(moe, "all-gather", "bf16", ranks * own * hidden, "all")
        add(moe, "reduce-scatter", "bf16", own * hidden, "all")
    else:
        add(moe, "all-gather", "s32", ranks * (model.num_experts + ranks), "all")
        add(moe, "ragged-all-to-all", "bf16", ranks * own * hidden, "all")
        add(moe, "ragged-all-to-all", "s32", ranks * own * 2 * k, "all")
        add(moe, "ragged-all-to-all", "bf16", own * min(k, ranks) * hidden, "all")
    if mesh.nodes > 1:
        places = bucket[1] * config.engine.tile
        add(1, "all-gather", "s32", mesh.dp * chosen, "dp")
        for of_each, over, within in ((chosen, mesh.dp, "dp"), (places, 1, "tp"), (places, mesh.dp, "dp")):
            if of_each:
                add(1, "all-gather", "f32", over * of_each, within)
                add(1, "all-gather", "f32", over * of_each * MAX_LOGPROBS, within)
                add(1, "all-gather", "s32", over * of_each * MAX_LOGPROBS, within)
    return wanted


def census(program: Program) -> Census:
    """The collectives that the program has."""
    return Counter((one.kind, one.result.dtype, one.result.elements, one.groups) for one in collectives(program.hlo))


def kv_tokens(config: ServerConfig) -> int:
    """Tokens that an engine's KV pool holds."""
    return config.engine.num_pages * config.engine.page_size


def _over(rule: str, what: str, size: int, limit: int) -> Iterator[Finding]:
    if size > limit:
        yield Finding(rule, f"{what} {size / 1e9:.3f} GB per GPU, over {limit / 1e9:.3f} GB")


def _census_findings(found: Census, wanted: Census) -> Iterator[Finding]:
    for sign, difference in (("not in the design", found - wanted), ("missing", wanted - found)):
        for (kind, dtype, elements, groups), times in difference.items():
            yield Finding("collectives", f"{times} {kind} of {elements} {dtype} over {groups}: {sign}")


def _travelling_experts(program: Program, model: ModelConfig) -> Iterator[Finding]:
    widths = {(model.hidden_size, 2 * model.moe_intermediate_size), (model.moe_intermediate_size, model.hidden_size)}
    for one in collectives(program.hlo):
        if one.result.shape[-2:] in widths:
            yield Finding("experts stay", f"{one.kind} gives every device {one.result}")


def _in_place(program: Program) -> Iterator[Finding]:
    if kept := program.donated - donated_parameters(program.hlo):
        yield Finding("in place", f"donated parameters {sorted(kept)} are not updated in place")
    sizes = {(array.dtype, array.elements) for array in parameters(program.hlo)}
    for one in instructions(program.hlo):
        if one.opcode.startswith("copy") and any(
            (a.dtype, a.elements) in sizes and a.nbytes > 2**24 for a in one.results
        ):
            yield Finding("in place", f"{one.name} copies {one.results[0]}")


def _larger(rule: str, program: Program, elements: int) -> Iterator[Finding]:
    """Results of at least this many elements that are not the update of a parameter."""
    sizes = {(array.dtype, array.elements) for array in parameters(program.hlo)}
    for one in instructions(program.hlo):
        if one.opcode not in NOT_WRITTEN and not one.opcode.endswith("-done"):
            for array in one.results:
                if array.elements >= elements and (array.dtype, array.elements) not in sizes:
                    yield Finding(rule, f"{one.name} writes {array}")
