"""Rules that a compiled program of the server must keep, each with a name. A finding is a broken rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gimbal_jax.config import MAX_LOGPROBS, MeshConfig, ModelConfig, ServerConfig
from gimbal_jax.model.inputs import Bucket, group_sizes, step_shape
from gimbal_jax.model.memory import device_bytes
from gimbal_jax.model.prompt_logprobs import prompt_block
from gimbal_jax.model.sharding import kv_heads_in_cache
from gimbal_jax.pallas_kernels.grouped_matmul import chunk_rows
from gimbal_jax.planning.compiled import Program, shallow
from gimbal_jax.planning.hardware import Gpu
from gimbal_jax.planning.hlo import Groups, collectives, donated_parameters, instructions, mosaic_kernels, parameters

GroupName = Literal["all", "tp", "dp"]
"""Devices that exchange data: all of them, those of each engine, or one of each engine."""
Census = Counter[tuple[str, str, int, Groups]]
"""Number of times that devices exchange an array: (collective, dtype, elements on a device, groups)."""

NOT_WRITTEN = ("parameter", "bitcast", "tuple", "get-tuple-element", "while", "conditional", "constant")
"""Instructions whose result is memory that another instruction wrote."""


@dataclass(frozen=True)
class Subject:
    """A compiled program, and the server that would run it."""

    program: Program
    model: ModelConfig
    """The whole model, also if fewer layers were compiled."""
    config: ServerConfig
    gpu: Gpu
    utilisation: float
    """Share of a GPU's memory that the server may use."""
    bucket: Bucket | None
    """(decode rows, prefill tiles) of a step; None for a migration round."""


@dataclass(frozen=True)
class Rule:
    """A property that every program must have."""

    text: str
    """The rule in words, for the report and docs/cuda.md."""
    check: Callable[[Subject], Iterable[str]]
    """Returns a line for each way in which a program breaks the rule."""
    steps_only: bool = False
    """Whether the rule does not apply to migration rounds."""


@dataclass(frozen=True)
class Finding:
    """A rule that a program breaks."""

    rule: str
    detail: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.detail}"


@dataclass(frozen=True)
class ExpectedCollective:
    """A collective that the design has for a program."""

    times: int
    kind: str
    dtype: str
    elements: int
    """On each device."""
    group: GroupName
    why: str


def findings(subject: Subject) -> list[Finding]:
    """Return the rules of ``RULES`` that a program breaks, in their order; none if it passes."""
    return [
        Finding(name, detail)
        for name, rule in RULES.items()
        if subject.bucket is not None or not rule.steps_only
        for detail in rule.check(subject)
    ]


def census(program: Program) -> Census:
    """Count the collectives of a program."""
    return Counter((one.kind, one.result.dtype, one.result.elements, one.groups) for one in collectives(program.hlo))


def expected_census(expected: Iterable[ExpectedCollective], mesh: MeshConfig) -> Census:
    """Count expected collectives, without those in groups of one device, which XLA removes."""
    groups, counted = mesh_groups(mesh), Census()
    for one in expected:
        if len(groups[one.group][0]) > 1:
            counted[one.kind, one.dtype, one.elements, groups[one.group]] += one.times
    return counted


def mesh_groups(mesh: MeshConfig) -> dict[GroupName, Groups]:
    """Return the device numbers of each kind of group."""
    ids = np.arange(mesh.ranks)

    def rows(grid: np.ndarray) -> Groups:
        return tuple(tuple(int(n) for n in row) for row in grid)

    of_engines = ids.reshape(mesh.dp, mesh.tp)
    return {"all": rows(ids[None]), "tp": rows(of_engines), "dp": rows(of_engines.T)}


def step_collectives(model: ModelConfig, config: ServerConfig, bucket: Bucket) -> Iterator[ExpectedCollective]:
    """Yield the collectives that the design has for a step of ``model``."""
    mesh, tile = config.mesh, config.engine.tile
    shape = step_shape(config.engine, bucket)
    tokens, chosen, prompt_places = shape.tokens, shape.sequences, bucket[1] * tile
    hidden, vocabulary, moe = model.hidden_size, model.vocab_size, len(model.moe_layers)
    dense = model.num_layers - moe
    one = ExpectedCollective

    yield one(1, "all-reduce", "bf16", tokens * hidden, "tp", "sum of the embedding's shards")
    yield one(model.num_layers, "all-reduce", "bf16", tokens * hidden, "tp", "attention output of each layer")
    if dense:
        yield one(dense, "all-reduce", "bf16", tokens * hidden, "tp", "output of each dense feed-forward layer")
    yield one(moe, "all-gather", "bf16", tokens * hidden, "tp", "MoE outputs, which each device has for its own tokens")
    yield one(1, "all-gather", "f32", chosen * vocabulary, "tp", "logits of the next tokens")
    if prompt_places:
        block = prompt_block(prompt_places, chosen, mesh.tp)
        yield one(1, "all-to-all", "f32", block * vocabulary // mesh.tp, "tp", "logits of a block of prompt tokens")
    yield from _exchange_collectives(model, config, tokens // mesh.tp)
    if mesh.nodes > 1:
        yield from _result_collectives(mesh, chosen, prompt_places)


def _exchange_collectives(model: ModelConfig, config: ServerConfig, own: int) -> Iterator[ExpectedCollective]:
    """The MoE exchange over all ranks, each of which has ``own`` tokens (see ``model.moe``)."""
    moe, hidden, experts, k = len(model.moe_layers), model.hidden_size, model.num_experts, model.experts_per_token
    ranks = config.mesh.ranks
    one = ExpectedCollective
    if config.engine.exchange == "gather":
        numbers = ranks * (3 * own * k + experts)
        yield one(moe, "all-gather", "s32", numbers, "all", "slots, positions and weights of chosen experts, counts")
        yield one(moe, "all-gather", "bf16", ranks * own * hidden, "all", "tokens to all ranks")
        yield one(moe, "reduce-scatter", "bf16", own * hidden, "all", "results back to each token's rank")
    else:
        returned, ragged = own * min(k, ranks) * hidden, "ragged-all-to-all"
        yield one(moe, "all-gather", "s32", ranks * (experts + ranks), "all", "counts by expert and by rank")
        yield one(moe, ragged, "bf16", ranks * own * hidden, "all", "tokens to the ranks of their experts")
        yield one(moe, ragged, "s32", ranks * own * 2 * k, "all", "places and weights of those experts")
        yield one(moe, ragged, "bf16", returned, "all", "results back to each token's rank")


def _result_collectives(mesh: MeshConfig, chosen: int, prompt_places: int) -> Iterator[ExpectedCollective]:
    """Results that the leading host reads of all engines, if it does not have all devices."""
    one = ExpectedCollective

    def logprobs(places: int, group: GroupName, why: str) -> Iterator[ExpectedCollective]:
        yield one(1, "all-gather", "f32", places, group, f"log probabilities {why}")
        yield one(1, "all-gather", "f32", places * MAX_LOGPROBS, group, f"log probabilities of alternatives {why}")
        yield one(1, "all-gather", "s32", places * MAX_LOGPROBS, group, f"alternatives {why}")

    yield one(1, "all-gather", "s32", mesh.dp * chosen, "dp", "next tokens of all engines")
    yield from logprobs(mesh.dp * chosen, "dp", "of next tokens, of all engines")
    if prompt_places:
        yield from logprobs(prompt_places, "tp", "of prompt tokens, within an engine")
        yield from logprobs(mesh.dp * prompt_places, "dp", "of prompt tokens, of all engines")


def migration_collectives(model: ModelConfig, config: ServerConfig) -> Iterator[ExpectedCollective]:
    """Yield the collectives that the design has for a round of moves."""
    rows = config.mesh.ranks * config.placement.rows_per_pair
    width = model.hidden_size * model.moe_intermediate_size
    yield ExpectedCollective(1, "all-to-all", "bf16", 2 * rows * width, "all", "first products of moved experts")
    yield ExpectedCollective(1, "all-to-all", "bf16", rows * width, "all", "second products of moved experts")


def step_kernels(model: ModelConfig, bucket: Bucket) -> Counter[str]:
    """Count the Mosaic kernels that the design has for a step, named as by ``hlo.mosaic_kernels``."""
    moe = len(model.moe_layers)
    attention = model.num_layers * sum(number > 0 for number in bucket)
    return Counter({"route_and_count+wgmma": moe, "paged_attention+wgmma": attention, "ragged_dot_sm90+wgmma": 2 * moe})


def kv_tokens(config: ServerConfig) -> int:
    """Return the tokens that an engine's KV pool holds."""
    return config.engine.num_pages * config.engine.page_size


def _memory(s: Subject) -> Iterator[str]:
    yield from _over("peak", s.program.peak_bytes, int(s.gpu.memory_bytes * s.utilisation))


def _temporaries(s: Subject) -> Iterator[str]:
    memory = device_bytes(s.model, s.config, s.bucket or (0, 0), s.gpu.backend)
    limit = memory.migration if s.bucket is None else memory.step.total
    yield from _over("they take", s.program.temporary_bytes, limit)


def _over(what: str, size: int, limit: int) -> Iterator[str]:
    if size > limit:
        yield f"{what} {size / 1e9:.3f} GB per GPU, over {limit / 1e9:.3f} GB"


def _collectives(s: Subject) -> Iterator[str]:
    """Compare the program's collectives with those of the design, by kind, type, size and groups."""
    if s.bucket is None:
        expected = list(migration_collectives(s.model, s.config))
    else:
        expected = list(step_collectives(shallow(s.model, s.program.layers), s.config, s.bucket))
    present, wanted = census(s.program), expected_census(expected, s.config.mesh)
    for (kind, dtype, elements, groups), times in (present - wanted).items():
        yield f"{times} {kind} of {elements} {dtype} over {groups}: not in the design"
    group_of = mesh_groups(s.config.mesh)
    for key, times in (wanted - present).items():
        kind, dtype, elements, groups = key
        why = " or ".join(e.why for e in expected if (e.kind, e.dtype, e.elements, group_of[e.group]) == key)
        yield f"{times} {kind} of {elements} {dtype} over {groups}: missing ({why})"


def _experts_stay(s: Subject) -> Iterator[str]:
    hidden, width = s.model.hidden_size, s.model.moe_intermediate_size
    for one in collectives(s.program.hlo):
        if one.result.shape[-2:] in {(hidden, 2 * width), (width, hidden)}:
            yield f"{one.kind} gives every device {one.result}"


def _in_place(s: Subject) -> Iterator[str]:
    """Find donated parameters that keep their own memory, and copies of arrays as large as a parameter."""
    if kept := s.program.donated - donated_parameters(s.program.hlo):
        yield f"donated parameters {sorted(kept)} are not updated in place"
    sizes = {(array.dtype, array.elements) for array in parameters(s.program.hlo)}
    for one in instructions(s.program.hlo):
        if one.opcode.startswith("copy") and any(
            (a.dtype, a.elements) in sizes and a.nbytes > 2**24 for a in one.results
        ):
            yield f"{one.name} copies {one.results[0]}"


def _sparse_experts(s: Subject) -> Iterator[str]:
    assert s.bucket is not None
    tokens, _ = group_sizes(*s.bucket, s.config.engine.tile)
    slots = s.model.num_experts // s.config.mesh.ranks
    chunk = chunk_rows(tokens * s.config.mesh.dp, s.model.experts_per_token, slots, s.config.mesh.ranks)
    yield from _larger(s.program, chunk * slots * s.model.moe_intermediate_size)


def _paged_context(s: Subject) -> Iterator[str]:
    assert s.bucket is not None
    tp = s.config.mesh.tp
    kv_heads = kv_heads_in_cache(s.model, tp) // tp
    yield from _larger(s.program, s.bucket[0] * s.config.engine.max_model_len * kv_heads * s.model.head_dim)


def _larger(program: Program, elements: int) -> Iterator[str]:
    """Find results of at least this many elements that are not the update of a parameter."""
    sizes = {(array.dtype, array.elements) for array in parameters(program.hlo)}
    for one in instructions(program.hlo):
        if one.opcode not in NOT_WRITTEN and not one.opcode.endswith("-done"):
            for array in one.results:
                if array.elements >= elements and (array.dtype, array.elements) not in sizes:
                    yield f"{one.name} writes {array}"


def _kernels(s: Subject) -> Iterator[str]:
    assert s.bucket is not None
    present, wanted = mosaic_kernels(s.program.hlo), step_kernels(shallow(s.model, s.program.layers), s.bucket)
    if present != wanted:
        yield f"{dict(present)}, want {dict(wanted)}"


RULES = {
    "memory": Rule(
        "weights, KV pool and temporaries fit into the server's share of the GPU's memory, 0.9 by default",
        _memory,
        steps_only=True,
    ),
    "temporaries": Rule(
        "at most the memory reserved when the KV pool was sized; in a migration round, the moved rows",
        _temporaries,
    ),
    "collectives": Rule("exactly the collectives of the design, with their sizes and groups", _collectives),
    "experts stay": Rule("no collective gives a rank the weights of another's experts", _experts_stay, steps_only=True),
    "in place": Rule("KV pages, counters and experts are donated and not copied", _in_place),
    "sparse experts": Rule(
        "no product of tokens with experts that they did not choose", _sparse_experts, steps_only=True
    ),
    "paged context": Rule("no dense copy of the decode rows' keys or values", _paged_context, steps_only=True),
    "kernels": Rule("exactly the Mosaic kernels of the design, on the tensor cores", _kernels, steps_only=True),
}
"""All rules, by name."""
