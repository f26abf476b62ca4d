"""Weights that stay in bfloat16 while steps compute in float32."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gimbal_jax.config import MeshConfig
from gimbal_jax.model import loading
from gimbal_jax.model.demo_model import write_demo_model
from gimbal_jax.model.hf_config import load_config
from gimbal_jax.model.loading import load_weights, weights_dtype_on_cpu
from gimbal_jax.model.orbax_checkpoint import save_orbax
from gimbal_jax.model.sharding import make_mesh
from tests.model.rig import Chunk, Rig, rig, rig_of

GOLDENS = Path(__file__).parents[1] / "goldens"
PROMPT = np.random.default_rng(0).integers(0, 128, 30)


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """A checkpoint in bfloat16."""
    folder = tmp_path_factory.mktemp("demo")
    write_demo_model(folder)
    return folder


@pytest.fixture
def able(monkeypatch):
    """Pretend that this CPU multiplies bfloat16."""
    monkeypatch.setattr(loading, "_multiplies_bfloat16", lambda: True)


def logits_of(model: Rig) -> np.ndarray:
    """Return the logits of a prompt on the last engine, and of one more token."""
    idle: list[tuple[list[Chunk], list[Chunk]]] = [([], [])] * (model.mesh.shape["dp"] - 1)
    (prompt,) = model.run(*idle, ([], [Chunk(PROMPT, 0)]))[-1]
    (token,) = model.run(*idle, ([Chunk(np.array([5]), len(PROMPT))], []))[-1]
    return np.concatenate([prompt, token])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dp", "tp", "exchange"),
    [
        ("mlp_only", 2, 2, "sparse"),
        ("attention_bias", 2, 2, "gather"),
        ("tied", 1, 1, "gather"),
    ],
)
def test_logits_are_those_of_the_same_weights_in_float32(case, dp, tp, exchange):
    """The cases cover every product with weights: dense and expert layers, biases, and both output tables."""
    model = rig(GOLDENS / case, dp, tp)
    kept = jax.tree.map(lambda array: array.astype(jnp.bfloat16), model.weights)
    widened = jax.tree.map(lambda array: array.astype(jnp.float32), kept)
    got, want = (
        logits_of(rig_of(model.config, weights, model.slot_of_expert_LE, dp, tp, exchange))
        for weights in (kept, widened)
    )
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)


def test_weights_stay_bfloat16_only_for_float32_steps_and_bfloat16_files(demo, able):
    assert weights_dtype_on_cpu(demo, "float32") == "bfloat16"
    assert weights_dtype_on_cpu(demo, "float16") == "float16"
    assert weights_dtype_on_cpu(GOLDENS / "base", "float32") == "float32"


def test_one_float32_tensor_makes_all_weights_float32(demo, able, tmp_path):
    tensors = load_file(demo / "model.safetensors")
    name = sorted(tensors)[0]
    save_file(tensors | {name: tensors[name].astype(np.float32)}, tmp_path / "model.safetensors")
    assert weights_dtype_on_cpu(tmp_path, "float32") == "float32"


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_the_type_of_an_orbax_folder_is_read(demo, able, tmp_path, stored):
    config = load_config(demo)
    save_orbax(tmp_path / "saved", demo, *load_weights(demo, config, make_mesh(MeshConfig()), stored))
    assert weights_dtype_on_cpu(tmp_path / "saved", "float32") == stored


@pytest.mark.parametrize(
    ("flags", "wanted"), [("fpu amx_bf16", "bfloat16"), ("avx512_bf16", "bfloat16"), ("avx512f", "float32")]
)
def test_weights_stay_bfloat16_only_on_cpus_that_multiply_it(demo, monkeypatch, flags, wanted):
    monkeypatch.setattr(loading, "_cpu_flags", lambda: flags)
    assert weights_dtype_on_cpu(demo, "float32") == wanted
