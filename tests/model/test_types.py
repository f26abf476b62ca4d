"""Types inside a step: at most 32 bits, no weakly typed arrays, and no conversion of whole weights."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from gimbal_jax.config import EngineConfig, MeshConfig
from gimbal_jax.model.hf_config import PRESETS
from gimbal_jax.model.inputs import step_shape
from gimbal_jax.model.sharding import make_mesh
from gimbal_jax.model.step import abstract_model, abstract_state, step
from gimbal_jax.model.transformer import StepLayout
from gimbal_jax.serving.runtime.batch import default_rare_inputs

MODEL = replace(PRESETS["Qwen3-30B-A3B"], num_layers=2, moe_layers=(1,), attention_bias=True, vocab_size=5000)
ENGINE = EngineConfig(max_model_len=256, page_size=16, num_pages=40, max_rows=8, tile=32, token_budget=128)
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
BUCKETS = {"decode": (8, 0), "mixed": (8, 2)}
CASES = [
    ("float32", "mixed", (2, 2)),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [("float32", "decode", (1, 1)), ("bfloat16", "mixed", (1, 1)), ("bfloat16", "decode", (2, 2))]
    ),
]
"""Each pair of values of type, bucket and mesh occurs once."""


@cache
def traced(dtype: str, bucket: str, mesh_size: tuple[int, int]) -> tuple[Any, list[Any]]:
    """Return the jaxpr of a step, and its weights as shapes."""
    mesh = make_mesh(MeshConfig(*mesh_size))
    graph, weights = abstract_model(MODEL, DTYPES[dtype], mesh)
    shape = step_shape(ENGINE, BUCKETS[bucket])
    everywhere, by_engine = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("dp")))
    run = jax.jit(partial(step, graph, StepLayout(mesh, ENGINE.tile, "gather", "xla"), shape))
    closed = run.trace(
        weights,
        abstract_state(MODEL, ENGINE, DTYPES[dtype], mesh),
        jax.ShapeDtypeStruct((len(MODEL.moe_layers), MODEL.num_experts), jnp.int32, sharding=everywhere),
        jax.ShapeDtypeStruct((mesh_size[0], shape.packed), jnp.int32, sharding=by_engine),
        default_rare_inputs(ENGINE, MODEL.vocab_size, mesh_size[0]),
    ).jaxpr
    return closed, jax.tree.leaves(weights)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr and of all jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def results(jaxpr: Any) -> Iterator[tuple[str, Any]]:
    """Yield each array that a jaxpr computes, with the primitive that computes it."""
    for equation in equations(jaxpr):
        for out in equation.outvars:
            yield f"{equation.primitive.name} -> {out.aval}", out.aval


@pytest.mark.parametrize("dtype,bucket,mesh", CASES, ids=str)
def test_nothing_has_more_than_32_bits(dtype, bucket, mesh):
    closed, _ = traced(dtype, bucket, mesh)
    found = dict(results(closed.jaxpr))
    assert len(found) > 100
    numbers = {text: a for text, a in found.items() if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key)}
    assert not [text for text, array in numbers.items() if array.dtype.itemsize > 4]
    constants = [np.asarray(constant) for constant in closed.consts]
    assert not [constant for constant in constants if constant.dtype.itemsize > 4]


@pytest.mark.parametrize("dtype,bucket,mesh", CASES, ids=str)
def test_no_float_array_is_weakly_typed(dtype, bucket, mesh):
    """A weakly typed array takes the type of its other operand. Scalars are exempt, because they are literals."""
    closed, _ = traced(dtype, bucket, mesh)
    floats = [(text, a) for text, a in results(closed.jaxpr) if jnp.issubdtype(a.dtype, jnp.floating)]
    assert not [text for text, array in floats if array.weak_type and array.ndim]
    assert not [array for array in closed.out_avals if array.weak_type]


@pytest.mark.parametrize("dtype,bucket,mesh", CASES, ids=str)
def test_no_weight_but_the_router_s_is_converted(dtype, bucket, mesh):
    closed, weights = traced(dtype, bucket, mesh)
    ranks, matrices = mesh[0] * mesh[1], [w.shape for w in weights if len(w.shape) > 1]
    router = (MODEL.hidden_size, MODEL.num_experts)
    assert router in matrices
    whole = {shape for shape in matrices if shape != router}
    parts = {(shape[0] // ranks, *shape[1:]) for shape in whole}  # of experts, inside shard_map
    converted = [
        str(equation)
        for equation in equations(closed.jaxpr)
        if equation.primitive.name == "convert_element_type" and equation.invars[0].aval.shape in whole | parts
    ]
    assert not converted
