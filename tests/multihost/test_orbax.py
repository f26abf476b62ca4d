"""Orbax folders on a mesh of several processes: all save one checkpoint and restore it, as one process would."""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gimbal_jax.config import MeshConfig
from gimbal_jax.model.checkpoint import CheckpointError, load_safetensors
from gimbal_jax.model.hf_config import load_config
from gimbal_jax.model.loading import load_weights
from gimbal_jax.model.orbax_checkpoint import save_orbax
from gimbal_jax.model.sharding import make_mesh
from gimbal_jax.model.step import abstract_model
from tests.multihost.processes import on_mesh
from tests.multihost.shards import digests, merged

GOLDENS = Path(__file__).parents[1] / "goldens"
SLOTS = np.array([[7, 2, 5, 0, 1, 6, 3, 4], [1, 0, 3, 2, 5, 4, 7, 6]], np.int32)
MESHES = ((2, 2), (4, 1))


def placed():
    """The weights of a checkpoint with experts in another order, on a (2, 2) mesh."""
    config = load_config(GOLDENS / "sparse_step")
    _, abstract = abstract_model(config, jnp.float32, make_mesh(MeshConfig(2, 2)))
    return load_safetensors(GOLDENS / "sparse_step", config, abstract, SLOTS)


def loaded(folder, dp, tp):
    return load_weights(folder, load_config(folder), make_mesh(MeshConfig(dp, tp)), jnp.float32)


def restored(folder):
    """On each mesh: digests and placement."""
    found = {f"{dp} {tp}": loaded(folder, dp, tp) for dp, tp in MESHES}
    return {name: (digests(weights), slots.tolist()) for name, (weights, slots) in found.items()}


def save_and_restore(root: str, from_one: str):
    """Save two checkpoints, restore them and one that a single process saved, and return what is rejected and why."""
    process, weights = jax.process_index(), placed()
    time.sleep(0.5 * process)  # a late process must not find a half-made folder
    save_orbax(Path(root, "placed"), GOLDENS / "sparse_step", weights, SLOTS)
    save_orbax(Path(root, "few_heads"), GOLDENS / "kv1", *loaded(GOLDENS / "kv1", 4, 1))
    answers = {name: restored(Path(root, name)) for name in ("placed", "few_heads", from_one)}
    targets = {"taken": "placed", "taken for process 1": ("new", "placed")[process], "not shared": f"own-{process}"}
    rejected = {}
    began = time.monotonic()
    for reason, name in targets.items():
        with pytest.raises(CheckpointError) as error:
            save_orbax(Path(root, name), GOLDENS / "sparse_step", weights, SLOTS)
        rejected[reason] = str(error.value)
    assert time.monotonic() - began < 200  # a wait of one process for another would end after 300 s
    return answers, rejected


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    root = tmp_path_factory.mktemp("orbax")
    save_orbax(root / "from_one", GOLDENS / "sparse_step", placed(), SLOTS)
    answers = on_mesh(save_and_restore, processes=2, devices=2, root=str(root), from_one="from_one")
    return root, answers


@pytest.mark.parametrize("dp,tp", MESHES)
@pytest.mark.parametrize("name", ["placed", "few_heads", "from_one"])
def test_shards_equal_those_that_one_process_restores(answered, name, dp, tp):
    root, answers = answered
    parts = [answer[name][f"{dp} {tp}"] for answer, _ in answers]
    weights, slots = loaded(root / name, dp, tp)
    assert merged([digest for digest, _ in parts]) == digests(weights)
    assert [placement for _, placement in parts] == [slots.tolist()] * 2


def test_a_checkpoint_saved_together_equals_that_of_one_process(answered):
    root, _ = answered
    weights, slots = loaded(root / "placed", 2, 2)
    assert digests(weights) == digests(placed())
    np.testing.assert_array_equal(slots, SLOTS)
    weights, _ = loaded(root / "few_heads", 2, 2)
    assert digests(weights) == digests(loaded(GOLDENS / "kv1", 2, 2)[0])


def test_both_processes_write_shards_and_the_folder_is_complete(answered):
    root, _ = answered
    assert {path.name for path in (root / "placed").iterdir()} == {"weights", "config.json", "generation_config.json"}
    sizes = [
        sum(file.stat().st_size for file in (root / "placed" / "weights" / f"ocdbt.process_{i}" / "d").iterdir())
        for i in range(2)
    ]
    assert min(sizes) > 0.3 * sum(sizes)


def test_a_folder_that_one_process_rejects_is_rejected_by_all(answered):
    root, answers = answered
    first, second = (rejected for _, rejected in answers)
    taken = f"{root / 'placed'} already holds a checkpoint; choose another folder"
    assert first["taken"] == second["taken"] == taken
    assert "process 1 cannot write" in first["taken for process 1"]
    assert second["taken for process 1"] == taken
    for process, rejected in enumerate((first, second)):
        assert f"own-{process}: files of process {1 - process} are not visible here" in rejected["not shared"]
    assert not list((root / "own-0").iterdir()) and not list((root / "own-1").iterdir())
