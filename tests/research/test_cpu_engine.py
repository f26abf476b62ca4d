"""The widened demo model that the scripts measure, and its clients."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from gimbal_jax.config import MeshConfig
from gimbal_jax.model.hf_config import load_config
from gimbal_jax.model.loading import load_weights
from gimbal_jax.model.sharding import make_mesh
from gimbal_jax.pallas_kernels.grouped_matmul import grouped_ffn_reference
from gimbal_jax.simulation.workload import Arrival
from research.collection_overhead import count_in_a_pass
from research.cpu_clients import MOST_OUTPUT, scaled
from research.cpu_engine import ENGINE, widen_experts
from tests.e2e.rig import FOLDER


def test_wide_experts_give_equal_outputs():
    model = load_config(FOLDER)
    weights, _ = load_weights(FOLDER, model, make_mesh(MeshConfig()), "float32")
    mlp: Any = weights["layers"][model.moe_layers[0]]["mlp"]
    rng = np.random.default_rng(0)
    x_ND = jnp.asarray(rng.standard_normal((model.num_experts, model.hidden_size)), jnp.float32)
    place_N1 = jnp.arange(model.num_experts)[:, None]
    routed = x_ND, place_N1, jnp.ones(place_N1.shape), jnp.ones(model.num_experts, jnp.int32)

    def outputs():
        return grouped_ffn_reference(*routed, mlp["gate_up"].get_value(), mlp["down"].get_value())

    before = outputs()
    wide = widen_experts(model, weights, 3)
    assert wide.moe_intermediate_size == 3 * model.moe_intermediate_size
    assert mlp["gate_up"].get_value().shape[-1] == 2 * wide.moe_intermediate_size
    assert np.abs(before).max() > 0
    np.testing.assert_allclose(outputs(), before, rtol=1e-4, atol=1e-6)


def test_scaled_requests_fit_the_engine():
    arrivals = [Arrival(0.5, tokens, output, topic=3) for tokens in (1, 100, 10**6) for output in (1, 100, 10**6)]
    for before, after in zip(arrivals, scaled(arrivals), strict=True):
        assert after.input_tokens >= 1 and 1 <= after.output_tokens <= MOST_OUTPUT
        assert after.input_tokens + after.output_tokens <= ENGINE.max_model_len
        assert (after.time_s, after.topic) == (before.time_s, before.topic)


@pytest.mark.parametrize("padding", [0, 3])
def test_the_separate_pass_counts_the_chosen_experts(padding):
    rng = np.random.default_rng(1)
    slot_of_expert_E = rng.permutation(16)
    expert_Tk = np.array([rng.choice(16, 4, replace=False) for _ in range(10)])
    slot_Tk = slot_of_expert_E[expert_Tk]
    slot_Tk[10 - padding :] = -1
    counts_E = count_in_a_pass(jnp.asarray(slot_Tk), jnp.asarray(slot_of_expert_E))
    assert counts_E.tolist() == np.bincount(expert_Tk[: 10 - padding].ravel(), minlength=16).tolist()
