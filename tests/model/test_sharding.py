"""The rules of a mesh, and the table from logical axes to mesh axes."""

from dataclasses import replace

import jax
import pytest
from jax.sharding import PartitionSpec as P

from gimbal_jax.config import MeshConfig
from gimbal_jax.model.hf_config import PRESETS
from gimbal_jax.model.sharding import check_mesh, kv_heads_in_cache, make_mesh, sharding_for, spec_for

MODEL = PRESETS["Qwen3-30B-A3B"]  # 32 heads, 4 KV heads, 128 experts, vocabulary 151936


@pytest.mark.parametrize("dp,tp", [(1, 1), (2, 2), (1, 8), (4, 4), (16, 8)])
def test_meshes_that_fit(dp, tp):
    check_mesh(MODEL, MeshConfig(dp, tp))


@pytest.mark.parametrize(
    "changes,mesh,message",
    [
        ({}, MeshConfig(0, 1), "dp and tp must be at least 1, got dp=0, tp=1"),
        ({}, MeshConfig(1, -2), "dp and tp must be at least 1, got dp=1, tp=-2"),
        ({}, MeshConfig(3, 1), "num_experts = 128 must be divisible by dp * tp = 3; [1, 2, 4, 8, 16, 32, 64, 128]"),
        ({"num_heads": 36}, MeshConfig(1, 8), "num_attention_heads = 36 must be divisible by tp = 8"),
        ({"num_kv_heads": 6}, MeshConfig(1, 4), "num_key_value_heads = 6 and tp = 4: one must divide the other"),
        ({"vocab_size": 151937}, MeshConfig(1, 2), "vocab_size = 151937 must be divisible by tp = 2"),
        (
            {"moe_layers": (1,), "intermediate_size": 6146},
            MeshConfig(1, 4),
            "intermediate_size = 6146 must be divisible by tp = 4",
        ),
    ],
)
def test_meshes_that_do_not_fit_are_rejected_with_one_reason(changes, mesh, message):
    with pytest.raises(ValueError) as rejected:
        check_mesh(replace(MODEL, **changes), mesh)
    assert str(rejected.value).startswith(message)
    assert ";" not in str(rejected.value).replace("; [", "")


def test_one_error_names_all_broken_rules():
    with pytest.raises(ValueError) as rejected:
        check_mesh(MODEL, MeshConfig(1, 3))
    for name in ("num_attention_heads", "vocab_size", "num_key_value_heads", "num_experts"):
        assert name in str(rejected.value)


def test_intermediate_size_matters_only_with_dense_layers():
    check_mesh(replace(MODEL, intermediate_size=6146), MeshConfig(1, 4))


def test_too_few_devices_are_rejected():
    with pytest.raises(ValueError, match="a 2 x 4 mesh needs 8 devices; there are 4"):
        make_mesh(MeshConfig(2, 4))


def test_ranks_of_an_engine_are_neighbours():
    assert make_mesh(MeshConfig(2, 2)).devices.ravel().tolist() == jax.devices()[:4]
    assert make_mesh(MeshConfig(1, 1), jax.devices()[3:]).devices.ravel().tolist() == jax.devices()[3:]


@pytest.mark.parametrize(
    "axes,shape,spec",
    [
        (("slot", "embed", "expert_mlp"), (8, 16, 4), P(("dp", "tp"), None, None)),
        (("vocab", "embed"), (128, 16), P("tp", None)),
        (("embed", "heads", "head_dim"), (16, 4, 8), P(None, "tp", None)),
        (("embed", "kv_heads", "head_dim"), (16, 1, 8), P(None, None, None)),
        (("source", None, None, "kv_heads", None), (2, 9, 8, 2, 8), P("dp", None, None, "tp", None)),
    ],
)
def test_spec_follows_the_table(axes, shape, spec):
    mesh = make_mesh(MeshConfig(2, 2))
    assert spec_for(axes, shape, mesh) == spec
    assert sharding_for(axes, shape, mesh).spec == spec


@pytest.mark.parametrize("tp,heads", [(1, 4), (4, 4), (8, 8)])
def test_cache_has_a_kv_head_for_every_rank(tp, heads):
    assert kv_heads_in_cache(MODEL, tp) == heads
