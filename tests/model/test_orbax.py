"""Orbax folders restore the saved weights and placement on any mesh."""

import gc
import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gimbal_jax.config import MeshConfig, ModelConfig
from gimbal_jax.model.checkpoint import CheckpointError
from gimbal_jax.model.hf_config import load_config
from gimbal_jax.model.loading import load_weights
from gimbal_jax.model.orbax_checkpoint import is_orbax, load_orbax, save_orbax
from gimbal_jax.model.sharding import make_mesh, sharding_for
from gimbal_jax.model.step import abstract_model
from tests.model.rig import Rig, rig

GOLDEN = Path(__file__).parents[1] / "goldens" / "sparse_step"
SLOTS = np.array([[7, 2, 5, 0, 1, 6, 3, 4], [1, 0, 3, 2, 5, 4, 7, 6]], np.int32)


@pytest.fixture(scope="module")
def original() -> Rig:
    return rig(GOLDEN, 2, 2, slot_of_expert_LE=SLOTS)


@pytest.fixture(scope="module")
def saved(original, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("orbax") / "not" / "there"
    save_orbax(folder, GOLDEN, original.weights, SLOTS)
    return folder


def restore(folder: Path, config: ModelConfig) -> tuple[nnx.State, np.ndarray]:
    """Restore on one device."""
    _, abstract = abstract_model(config, jnp.float32, make_mesh(MeshConfig()))
    return load_orbax(folder, config, abstract)


@pytest.mark.parametrize("dp,tp", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_any_mesh_restores_the_same_weights_and_placement(saved, original, dp, tp):
    config = load_config(saved)
    assert config == load_config(GOLDEN)
    mesh = make_mesh(MeshConfig(dp, tp))
    weights, slot_of_expert_LE = load_weights(saved, config, mesh, jnp.float32)
    np.testing.assert_array_equal(slot_of_expert_LE, SLOTS)
    assert slot_of_expert_LE.dtype == np.int32
    wanted = dict(nnx.to_flat_state(original.weights))
    for path, variable in nnx.to_flat_state(weights):
        array = variable.get_value()
        np.testing.assert_array_equal(array, wanted.pop(path).get_value(), err_msg=str(path))
        assert array.sharding == sharding_for(variable.get_metadata("axes"), array.shape, mesh), path
    assert not wanted


@pytest.mark.parametrize("case", ["attention_bias", "kv1"])
@pytest.mark.parametrize(
    ("saved_from", "tp"), [(1, 4), (4, 1), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in [(2, 4), (4, 2)])]
)
def test_more_ranks_than_kv_heads_restore_from_fewer_and_back(tmp_path, case, saved_from, tp):
    def loaded(folder: Path, tp: int) -> tuple[nnx.State, np.ndarray]:
        return load_weights(folder, load_config(folder), make_mesh(MeshConfig(1, tp)), jnp.float32)

    golden = GOLDEN.parent / case
    save_orbax(tmp_path / "saved", golden, *loaded(golden, saved_from))
    got, _ = loaded(tmp_path / "saved", tp)
    want = dict(nnx.to_flat_state(loaded(golden, tp)[0]))
    for path, variable in nnx.to_flat_state(got):
        array, wanted = variable.get_value(), want.pop(path).get_value()
        np.testing.assert_array_equal(array, wanted, err_msg=str(path))
        assert array.sharding == wanted.sharding, path
    assert not want


def test_an_older_format_is_rejected_with_a_remedy(saved, tmp_path):
    """Format 1 had no number. Orbax stores the number in a file of its own."""
    folder = tmp_path / "old"
    shutil.copytree(saved, folder)
    metadata = folder / "weights" / "_CHECKPOINT_METADATA"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"custom_metadata": {}}))
    with pytest.raises(CheckpointError, match=r"of format 1, and only format 2 can be restored: .* gimbal convert"):
        restore(folder, load_config(saved))


def test_weights_may_be_restored_in_another_type(saved):
    config = load_config(saved)
    weights, _ = load_weights(saved, config, make_mesh(MeshConfig()), jnp.bfloat16)
    assert {variable.get_value().dtype for _, variable in nnx.to_flat_state(weights)} == {jnp.dtype("bfloat16")}


def test_a_folder_in_use_is_not_overwritten(saved, original):
    before = sorted((path, path.stat().st_mtime_ns) for path in saved.rglob("*"))
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        save_orbax(saved, GOLDEN, original.weights, SLOTS)
    assert sorted((path, path.stat().st_mtime_ns) for path in saved.rglob("*")) == before


def test_a_folder_with_brackets_in_its_name_is_rejected(original, tmp_path):
    with pytest.raises(CheckpointError, match=r"\[ in its name"):
        save_orbax(tmp_path / "[v2]" / "saved", GOLDEN, original.weights, SLOTS)
    assert not any(tmp_path.iterdir())


def test_configuration_and_tokenizer_are_copied(original, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(GOLDEN, source)
    (source / "tokenizer.json").write_text("{}")
    (source / "private.txt").write_text("stays")
    save_orbax(target, source, original.weights, SLOTS)
    assert {p.name for p in target.iterdir()} == {"weights", "config.json", "generation_config.json", "tokenizer.json"}


@pytest.mark.parametrize("case", ["base", "saved"])
def test_is_orbax(saved, case):
    assert is_orbax(saved if case == "saved" else GOLDEN.parent / case) == (case == "saved")


@pytest.mark.parametrize(
    "changes,name",
    [
        ({"num_experts": 16}, "mlp.gate_up"),
        ({"moe_intermediate_size": 24}, "mlp.gate_up"),
        ({"vocab_size": 256}, "embed"),
        ({"tie_embeddings": True}, "head"),
        ({"attention_bias": True}, "qkv_bias"),
        ({"num_layers": 5}, "layers.4"),
        ({"num_layers": 2, "moe_layers": (1,)}, "layers.2"),
        ({"moe_layers": (1, 2, 3)}, "layers.2.mlp"),
    ],
    ids=str,
)
def test_a_configuration_that_does_not_fit_is_rejected_and_named(saved, changes, name):
    with pytest.raises(CheckpointError) as rejected:
        restore(saved, replace(load_config(saved), **changes))
    assert name in str(rejected.value) and str(saved) in str(rejected.value)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["metadata", "data", "manifest"])
def test_a_damaged_folder_is_rejected(saved, tmp_path, damage):
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    weights = folder / "weights"
    match damage:
        case "metadata":
            (weights / "_METADATA").unlink()
        case "data":
            largest = max(weights.rglob("d/*"), key=lambda path: path.stat().st_size)
            largest.write_bytes(largest.read_bytes()[:1000])
        case "manifest":
            (weights / "manifest.ocdbt").unlink()
    with pytest.raises(CheckpointError, match=f"{folder} cannot be restored: .+"):
        restore(folder, load_config(saved))
    gc.collect()  # Orbax leaves unfinished reads, which the collector reports
