"""The MoE exchange, over four ranks and within one, equals a loop over tokens and their experts."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from gimbal_jax.config import MeshConfig
from gimbal_jax.model import moe
from gimbal_jax.model.sharding import RANKS, make_mesh
from gimbal_jax.pallas_kernels import Backend, grouped_ffn, grouped_matmul, route_and_count

MESH = make_mesh(MeshConfig(2, 2))
TOKENS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 24, 8, 2, 6, 5
BACKENDS: dict[str, Backend] = {"": "xla", "chunks": "interpret", "ragged": "mosaic"}
SLOT_OF_EXPERT = np.array([3, 0, 6, 1, 7, 2, 4, 5], np.int32)


def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """Emulate ``jax.lax.ragged_all_to_all`` as documented, because CPUs do not have it."""
    operands, starts, sizes, to = (
        jax.lax.all_gather(array, axis_name) for array in (operand, input_offsets, send_sizes, output_offsets)
    )
    here, rows = jax.lax.axis_index(axis_name), jnp.arange(len(output))
    for source in range(len(operands)):
        nth = rows - to[source, here]
        arrives = (nth >= 0) & (nth < sizes[source, here]) & (nth < recv_sizes[source])
        value = operands[source][jnp.clip(starts[source, here] + nth, 0, len(operand) - 1)]
        output = jnp.where(arrives[:, None], value, output)
    return output


FAST = ["gather", "sparse"]
SLOW = ["gather, chunks", "sparse, chunks", "sparse, ragged", "alone"]


@pytest.fixture(scope="module", params=[*FAST, *(pytest.param(form, marks=pytest.mark.slow) for form in SLOW)])
def exchange(request):
    """Both forms in plain XLA and with the chunked product, the ragged collective of CUDA, and one rank alone."""
    form, _, variant = request.param.partition(", ")
    mesh = make_mesh(MeshConfig()) if form == "alone" else MESH

    def on_rank(x, logits, valid, gate_up, down):
        placement = jnp.asarray(SLOT_OF_EXPERT)
        routing = route_and_count(logits, valid, placement, k=TOP_K, renormalise=True, ranks=mesh.size)
        return moe.moe_exchange(
            "sparse" if form == "alone" else form, x, routing, placement, gate_up, down, BACKENDS[variant]
        )

    def by_xla(*arrays, backend, **settings):
        return grouped_ffn(*arrays, **settings)

    with pytest.MonkeyPatch.context() as patch:
        if variant == "ragged":
            patch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
            patch.setattr(moe, "grouped_ffn", by_xla)
        patch.setattr(grouped_matmul, "ALWAYS_ONE_CHUNK", 8)
        sharded = partial(jax.shard_map, mesh=mesh, in_specs=(P(RANKS),) * 5, out_specs=P(RANKS), check_vma=False)
        yield jax.jit(sharded(on_rank))


def operands(load: str) -> list[Any]:
    """Return tokens, logits (minus infinity for experts that are not chosen), validity, and weights by slot."""
    rng = np.random.default_rng(0)
    expert_Tk = np.array([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
    expert_of_slot = np.argsort(SLOT_OF_EXPERT)
    valid_T = np.ones(TOKENS, bool)
    match load:
        case "one rank":
            expert_Tk[:] = expert_of_slot[[4, 5]]
        case "all but one token to one rank":
            expert_Tk[:], expert_Tk[7] = expert_of_slot[[0, 1]], expert_of_slot[[6, 3]]
        case "half padding":
            valid_T = rng.random(TOKENS) < 0.5
        case "nothing":
            valid_T[:] = False
    logits_TE = np.full((TOKENS, EXPERTS), -np.inf, np.float32)
    np.put_along_axis(logits_TE, expert_Tk, rng.normal(size=expert_Tk.shape).astype(np.float32), axis=1)
    x_TD = rng.normal(size=(TOKENS, HIDDEN)).astype(np.float32)
    gate_up_PDF = rng.normal(size=(EXPERTS, HIDDEN, 2 * INTERMEDIATE)).astype(np.float32)
    down_PFD = rng.normal(size=(EXPERTS, INTERMEDIATE, HIDDEN)).astype(np.float32)
    return [x_TD, logits_TE, valid_T, gate_up_PDF, down_PFD]


def expected(x_TD, logits_TE, valid_T, gate_up_PDF, down_PFD) -> np.ndarray:
    y_TD = np.zeros(x_TD.shape)
    for t in np.flatnonzero(valid_T):
        weight_E = np.exp(logits_TE[t].astype(np.float64))
        for e in np.flatnonzero(weight_E):
            slot = SLOT_OF_EXPERT[e]
            gate, up = np.split(x_TD[t].astype(np.float64) @ gate_up_PDF[slot], 2)
            y_TD[t] += weight_E[e] / weight_E.sum() * (gate / (1 + np.exp(-gate)) * up) @ down_PFD[slot]
    return y_TD


@pytest.mark.parametrize(
    "load", ["even", "one rank", "all but one token to one rank", "half padding", "nothing"], ids=str
)
def test_nothing_is_dropped_under_any_load(exchange, load):
    arrays = operands(load)
    np.testing.assert_allclose(exchange(*arrays), expected(*arrays), atol=1e-5, rtol=1e-5)


def test_nan_in_padding_and_in_a_bad_token_reaches_no_other_token(exchange):
    x_TD, logits_TE, valid_T, *weights = operands("half padding")
    want_TD = np.array(exchange(x_TD, logits_TE, valid_T, *weights))
    bad = int(np.flatnonzero(valid_T)[3])
    x_TD[~valid_T], x_TD[bad], want_TD[bad] = np.nan, np.nan, np.nan
    np.testing.assert_array_equal(exchange(x_TD, logits_TE, valid_T, *weights), want_TD)


def test_places_are_those_of_all_pairs_sorted_by_slot_then_source():
    rng = np.random.default_rng(0)
    ranks, slots = 3, 12
    count_RE = rng.integers(0, 4, (ranks, slots)).astype(np.int32)
    pairs = sorted(
        (slot, source) for source in range(ranks) for slot in range(slots) for _ in range(count_RE[source, slot])
    )
    first_RE, size_RP = moe.first_places(jnp.asarray(count_RE))
    for source, slot in zip(*np.nonzero(count_RE), strict=True):
        rank_start = 4 * (slot // 4)
        here = [pair for pair in pairs if rank_start <= pair[0] < rank_start + 4]
        assert first_RE[source, slot] == here.index((slot, source))
    np.testing.assert_array_equal(size_RP, count_RE.sum(axis=0).reshape(ranks, 4))
