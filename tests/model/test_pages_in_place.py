"""A step writes new keys and values into the pages in place."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from gimbal_jax.config import EngineConfig, MeshConfig
from gimbal_jax.model.hf_config import PRESETS
from gimbal_jax.model.inputs import step_shape
from gimbal_jax.model.sharding import make_mesh
from gimbal_jax.model.step import abstract_model, abstract_state, step
from gimbal_jax.model.transformer import StepLayout
from gimbal_jax.serving.runtime.batch import default_rare_inputs

MODEL = replace(PRESETS["Qwen3-30B-A3B"], num_layers=2, moe_layers=(1,), vocab_size=1000, hidden_size=64)
ENGINE = EngineConfig(max_model_len=256, page_size=16, num_pages=40, max_rows=8, tile=32, token_budget=128)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "bucket"), [(1, (8, 2)), (4, (8, 0)), (4, (8, 2))], ids=str)
def test_no_pages_are_copied(tp, bucket):
    """With tp = 4 a rank has a single KV head, and XLA may move the axis of that head anywhere."""
    mesh = make_mesh(MeshConfig(1, tp))
    graph, weights = abstract_model(MODEL, jnp.float32, mesh)
    shape = step_shape(ENGINE, bucket)
    everywhere, by_engine = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("dp")))
    run = jax.jit(partial(step, graph, StepLayout(mesh, ENGINE.tile, "gather", "xla"), shape), donate_argnums=1)
    compiled = run.lower(
        weights,
        abstract_state(MODEL, ENGINE, jnp.float32, mesh),
        jax.ShapeDtypeStruct((len(MODEL.moe_layers), MODEL.num_experts), jnp.int32, sharding=everywhere),
        jax.ShapeDtypeStruct((1, shape.packed), jnp.int32, sharding=by_engine),
        default_rare_inputs(ENGINE, MODEL.vocab_size, 1),
    ).compile()
    pages = rf"f32\[1,{ENGINE.num_pages},{ENGINE.page_size},{MODEL.num_kv_heads // tp},{MODEL.head_dim}\]"
    text = compiled.as_text()
    assert text is not None and re.search(pages, text)
    assert not re.findall(rf"^.*copy\S* = {pages}.*$", text, re.MULTILINE)
