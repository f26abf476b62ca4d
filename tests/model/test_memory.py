"""Memory arithmetic equals the bytes of the shards and a calculation by hand, and the KV pool is as large as fits."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from gimbal_jax.config import EngineConfig, MeshConfig, ModelConfig, PlacementConfig, ServerConfig
from gimbal_jax.model.hf_config import PRESETS
from gimbal_jax.model.memory import (
    device_bytes,
    kv_bytes_per_token,
    migration_bytes,
    rare_bytes,
    step_bytes,
    weight_bytes,
)
from gimbal_jax.model.sharding import RANKS
from gimbal_jax.model.sizes import expert_bytes
from gimbal_jax.model.step import abstract_model, abstract_state
from gimbal_jax.serving.runtime.batch import default_rare_inputs

QWEN = PRESETS["Qwen3-30B-A3B"]
SMALL = {name: replace(model, num_layers=3, moe_layers=(0, 2)) for name, model in PRESETS.items()}
MODELS = {
    **SMALL,
    "tied": replace(SMALL["Qwen3-30B-A3B"], tie_embeddings=True),
    "biased": replace(SMALL["Qwen3-30B-A3B"], attention_bias=True),
    "float32": replace(SMALL["Qwen3-30B-A3B"], dtype="float32", weights_dtype="float32"),
    "bfloat16 weights": replace(SMALL["Qwen3-30B-A3B"], dtype="float32"),
}


def held(tree: object) -> int:
    """Return the bytes of one device's shards."""
    arrays = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, jax.ShapeDtypeStruct))
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in arrays)


def parts_of(weights: nnx.State) -> dict[str, int]:
    """Return the bytes of one device's shards, by the fields of ``WeightBytes``."""
    parts = dict.fromkeys(("experts", "attention", "router", "dense", "vocabulary"), 0)
    for path, variable in nnx.to_flat_state(weights):
        axes = variable.get_metadata("axes")
        if path[0] != "layers":
            part = "vocabulary"
        elif "mlp" in path:
            part = "experts" if "slot" in axes else "router" if "router" in axes else "dense"
        else:
            part = "attention"
        parts[part] += held(variable.get_value())
    return parts


def on(dp: int, tp: int) -> AbstractMesh:
    return AbstractMesh((dp, tp), RANKS)


@pytest.mark.parametrize("dp,tp", [(1, 1), (2, 2), (1, 4), (4, 1), (1, 8), (2, 8), (4, 8)])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_weight_bytes_equal_the_model_s_shards(model: ModelConfig, dp, tp):
    _, weights = abstract_model(model, model.weights_dtype, on(dp, tp))  # type: ignore[arg-type]
    found = weight_bytes(model, MeshConfig(dp, tp))
    assert vars(found) == parts_of(weights)
    assert found.total == sum(vars(found).values())


@pytest.mark.parametrize("dp,tp", [(1, 1), (2, 2), (1, 8), (2, 16)])
def test_page_and_counter_bytes_equal_the_state_s_shards(dp, tp):
    model, engine = SMALL["Qwen3-235B-A22B"], EngineConfig(num_pages=1, page_size=16)

    def state(pages: int) -> int:
        return held(abstract_state(model, replace(engine, num_pages=pages), model.dtype, on(dp, tp)))  # type: ignore[arg-type]

    found = device_bytes(model, ServerConfig(MeshConfig(dp, tp), engine), (32, 0))
    assert state(8) - state(7) == found.page
    assert state(0) <= found.tables


@pytest.mark.parametrize("vocab_size,budget", [(151936, 8192), (1000, 100)])
def test_rare_bytes_equal_the_server_s_arrays(vocab_size, budget):
    engine = EngineConfig(max_model_len=123, max_rows=7, token_budget=budget, tile=64)
    arrays = vars(default_rare_inputs(engine, vocab_size, engines=1)).values()
    flags = sum(array.nbytes for array in arrays if not array.ndim)
    assert rare_bytes(vocab_size, engine) == sum(array.nbytes for array in arrays) - flags


def test_the_paper_s_request_takes_187_5_mib():
    assert 2000 * kv_bytes_per_token(QWEN) == 187.5 * 2**20
    assert 200 * kv_bytes_per_token(QWEN) == 18.75 * 2**20


def test_by_hand_on_the_paper_s_testbed():
    # An expert is 3 matrices of 2048 x 768 in two bytes; 48 layers have 128 experts each, over 4 GPUs.
    assert expert_bytes(QWEN) == 9_437_184
    weights = weight_bytes(QWEN, MeshConfig(2, 2))
    assert weights.experts == 48 * 32 * 9_437_184
    # q and o of 16 heads, k and v of 2, and the norms.
    assert weights.attention == 48 * (2048 * 128 * (16 + 16 + 2 + 2) + 2 * 2048 + 2 * 128) * 2
    assert weights.router == 48 * 2048 * 128 * 2
    assert weights.dense == 0
    assert weights.vocabulary == (2 * 151936 // 2 + 1) * 2048 * 2
    # Keys and values of 2 heads of 128 in 48 layers.
    assert kv_bytes_per_token(QWEN, 2) == 2 * 48 * 2 * 128 * 2
    # 2 rows to and from each of 4 ranks.
    assert migration_bytes(QWEN, MeshConfig(2, 2), 2) == 16 * 9_437_184


@pytest.mark.parametrize("tp,heads", [(1, 4), (2, 2), (4, 1), (8, 1), (16, 1)])
def test_kv_heads_are_copied_if_an_engine_has_more_devices(tp, heads):
    assert kv_bytes_per_token(QWEN, tp) == heads * kv_bytes_per_token(QWEN) // 4


@pytest.mark.parametrize("backend", ["mosaic", "xla"])
@pytest.mark.parametrize("model", [QWEN, SMALL["Qwen3-235B-A22B"]], ids=["sparse", "with dense layers"])
def test_a_larger_step_needs_at_least_as_much(model, backend):
    engine = EngineConfig(tile=64)
    buckets = [(32, 0), (128, 0), (128, 32), (128, 128)]
    sizes = [step_bytes(model, MeshConfig(2, 2), engine, bucket, backend) for bucket in buckets]
    for part in ("activations", "attention", "feed_forward", "logits", "total"):
        assert list(np.sort([getattr(size, part) for size in sizes])) == [getattr(size, part) for size in sizes]
    last = sizes[-1]
    assert last.total == last.activations + max(last.attention, last.feed_forward, last.logits)
    # The logits alone, in float32.
    assert last.logits >= 256 * model.vocab_size * 4


@given(
    name=st.sampled_from(sorted(MODELS)),
    dp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2, 4, 8]),
    page_size=st.sampled_from([16, 64, 128]),
    rows=st.integers(1, 256),
    tiles=st.integers(0, 128),
    rows_per_pair=st.integers(1, 8),
    spare=st.integers(0, 2**36),
)
def test_the_pool_fits_and_one_page_more_would_not(name, dp, tp, page_size, rows, tiles, rows_per_pair, spare):
    engine = EngineConfig(page_size=page_size, tile=64)
    config = ServerConfig(MeshConfig(dp, tp), engine, placement=PlacementConfig(rows_per_pair=rows_per_pair))
    needed = device_bytes(MODELS[name], config, (rows, tiles))
    budget = needed.least + spare
    pages = needed.kv_pages(budget)
    rest = needed.weights.total + needed.migration + needed.step.total + needed.tables
    assert rest + pages * needed.page <= budget < rest + (pages + 1) * needed.page
    assert pages * page_size >= engine.max_model_len


def test_too_little_memory_is_rejected_with_numbers():
    needed = device_bytes(QWEN, ServerConfig(MeshConfig(2, 2), EngineConfig(page_size=64)), (32, 16))
    assert needed.kv_pages(needed.least) == 64
    with pytest.raises(ValueError) as rejected:
        needed.kv_pages(10**10)
    for part in ("may use 10.0 GB", f"needs {needed.least / 1e9:.1f} GB", "16.0 for weights", "for a step"):
        assert part in str(rejected.value)
    with pytest.raises(ValueError, match="one sequence"):
        needed.kv_pages(needed.least - 1)
