"""Products of float32 activations with bfloat16 weights are as exact as products in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from gimbal_jax.pallas_kernels import product
from gimbal_jax.pallas_kernels.product import PARTS, split

FORMS = {
    "std,dgnk->stgnk": ((2, 5, 48), (48, 2, 6, 16)),
    "sthk,hkd->std": ((1, 3, 4, 16), (4, 16, 48)),
    "stf,fd->std": ((1, 1, 48), (48, 32)),
    "sgd,vd->sgv": ((1, 40, 48), (96, 48)),
    "pcd,pdf->pcf": ((6, 8, 48), (6, 48, 32)),
    "bnd,bdf->bnf": ((1, 4, 48), (1, 48, 32)),
}


split_jitted = jax.jit(lambda x: split(x, 1))


@pytest.mark.parametrize("form", FORMS)
def test_float32_activations_keep_their_precision(form):
    rng = np.random.default_rng(0)
    x, weights = (rng.normal(size=size) for size in FORMS[form])
    x, weights = x.astype(np.float32), weights.astype(bfloat16)
    want = np.einsum(form, x.astype(np.float64), weights.astype(np.float64))
    got = jax.jit(lambda x, weights: product(form, x, weights))(x, weights)
    in_float32 = jax.jit(lambda x, weights: jnp.einsum(form, x, weights))(x, weights.astype(np.float32))
    assert got.dtype == jnp.float32
    assert np.abs(got - want).max() <= 1.5 * np.abs(in_float32 - want).max()


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
@pytest.mark.parametrize("result_type", [None, jnp.float32])
def test_weights_of_the_same_type_are_a_plain_product(dtype, result_type):
    rng = np.random.default_rng(0)
    x, weights = (jnp.asarray(rng.normal(size=size), dtype) for size in ((1, 4, 48), (96, 48)))
    got = product("sgd,vd->sgv", x, weights, result_type)
    np.testing.assert_array_equal(got, jnp.einsum("sgd,vd->sgv", x, weights, preferred_element_type=result_type))
    assert got.dtype == (result_type or dtype)


@given(st.lists(st.floats(2.0**-80, 2.0**100, width=32), min_size=20, max_size=20), st.sampled_from([1, -1]))
def test_the_parts_add_up_to_the_number(numbers, sign):
    x = np.array(numbers, np.float32) * sign
    parts = np.asarray(split_jitted(x))
    assert parts.dtype == bfloat16 and parts.shape == (len(x), PARTS)
    np.testing.assert_array_equal(parts.astype(np.float64).sum(axis=1), x)
