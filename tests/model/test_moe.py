"""The MoE exchange over four ranks against a dense product over all slots."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from gimbal_jax.config import MeshConfig
from gimbal_jax.model.moe import moe_exchange
from gimbal_jax.model.sharding import RANKS, make_mesh
from gimbal_jax.pallas_kernels import Routing, grouped_ffn_reference

MESH = make_mesh(MeshConfig(2, 2))
TOKENS, SLOTS, TOP_K, HIDDEN, INTERMEDIATE = 24, 8, 2, 6, 5


@pytest.fixture(params=["gather", "sparse"])
def exchange(request):
    def on_rank(x, slot, weight, gate_up, down):
        return moe_exchange(request.param, x, Routing(slot, weight, jnp.zeros(SLOTS, jnp.int32)), gate_up, down)

    return jax.jit(
        partial(jax.shard_map, mesh=MESH, in_specs=(P(RANKS),) * 5, out_specs=P(RANKS), check_vma=False)(on_rank)
    )


def operands(load: str) -> list[Any]:
    rng = np.random.default_rng(0)
    slot_Tk = np.array([rng.permutation(SLOTS)[:TOP_K] for _ in range(TOKENS)], np.int32)
    match load:
        case "one rank":
            slot_Tk[:] = 4, 5
        case "all but one token to one rank":
            slot_Tk[:], slot_Tk[7] = (0, 1), (6, 3)
        case "half padding":
            slot_Tk[rng.random(TOKENS) < 0.5] = -1
        case "nothing":
            slot_Tk[:] = -1
    weight_Tk = np.where(slot_Tk >= 0, rng.random((TOKENS, TOP_K)), 0).astype(np.float32)
    x_TD = rng.normal(size=(TOKENS, HIDDEN)).astype(np.float32)
    gate_up_PDF = rng.normal(size=(SLOTS, HIDDEN, 2 * INTERMEDIATE)).astype(np.float32)
    return [x_TD, slot_Tk, weight_Tk, gate_up_PDF, rng.normal(size=(SLOTS, INTERMEDIATE, HIDDEN)).astype(np.float32)]


@pytest.mark.parametrize(
    "load", ["even", "one rank", "all but one token to one rank", "half padding", "nothing"], ids=str
)
def test_nothing_is_dropped_under_any_load(exchange, load):
    arrays = operands(load)
    np.testing.assert_allclose(exchange(*arrays), grouped_ffn_reference(*arrays), atol=1e-5, rtol=1e-5)


def test_nan_in_padding_and_in_a_bad_token_reaches_no_other(exchange):
    x_TD, slot_Tk, *rest = operands("half padding")
    want_TD = np.array(exchange(x_TD, slot_Tk, *rest))
    padding_T = slot_Tk[:, 0] < 0
    bad = int(np.flatnonzero(~padding_T)[3])
    x_TD[padding_T], x_TD[bad], want_TD[bad] = np.nan, np.nan, np.nan
    np.testing.assert_array_equal(exchange(x_TD, slot_Tk, *rest), want_TD)
