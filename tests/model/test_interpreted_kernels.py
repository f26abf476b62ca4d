"""A whole model with the Mosaic kernels, interpreted on a CPU, gives the results of plain XLA."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gimbal_jax.config import MeshConfig, ModelConfig
from gimbal_jax.model.sharding import make_mesh
from gimbal_jax.model.step import abstract_model
from gimbal_jax.pallas_kernels import Backend
from tests.model.rig import Chunk, Rig, rig_of

MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    num_experts=8,
    experts_per_token=2,
    moe_intermediate_size=64,
    moe_layers=(0, 1),
)
TOKENS = np.random.default_rng(0).integers(0, MODEL.vocab_size, 14)
BACKENDS: tuple[Backend, ...] = ("xla", "interpret")
SLOT_OF_EXPERT_LE = np.array([[3, 0, 6, 1, 7, 2, 4, 5], [7, 6, 5, 4, 3, 2, 1, 0]], np.int32)


def random_weights() -> nnx.State:
    """Return norms of 1, and matrices whose products are about as large as their operands."""
    rng = np.random.default_rng(1)
    _, abstract = abstract_model(MODEL, jnp.bfloat16, make_mesh(MeshConfig(1, 1)))

    def randomised(variable: nnx.Variable) -> nnx.Variable:
        array = variable.get_value()
        scale = MODEL.hidden_size**-0.5
        value = np.ones(array.shape) if array.ndim == 1 else rng.normal(size=array.shape) * scale
        return variable.replace(jax.device_put(jnp.asarray(value, array.dtype), array.sharding))

    return jax.tree.map(randomised, abstract, is_leaf=lambda v: isinstance(v, nnx.Variable))


def logits_of(model: Rig) -> np.ndarray:
    """Return the logits of a step with a decode row, the first token of a sequence, and two tiles of a prompt."""
    (row, prompt), *_ = model.run(([Chunk(TOKENS[-1:], 0, first_page=12)], [Chunk(TOKENS[:-1], 0)]))
    return np.concatenate([row, prompt])


@pytest.mark.slow
def test_logits_and_counts_are_those_of_plain_xla():
    """The mesh is one device, because the interpreter does not run kernels on several devices."""
    settings = MODEL, random_weights(), SLOT_OF_EXPERT_LE, 1, 1
    plain, kernels = (
        replace(rig_of(*settings, backend=backend, dtype=jnp.bfloat16), decode_rows=1, tiles=2) for backend in BACKENDS
    )
    want_TV, got_TV = logits_of(plain), logits_of(kernels)
    assert np.abs(got_TV - want_TV).max() < 0.03 * np.abs(want_TV).max()
    np.testing.assert_array_equal(kernels.counts_LSE(), plain.counts_LSE())
    assert kernels.counts_LSE().sum() == len(TOKENS) * MODEL.experts_per_token * len(MODEL.moe_layers)
