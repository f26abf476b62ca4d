"""Hugging Face folders load into the right shards, and errors name what is wrong with a folder."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from gimbal_jax.config import MeshConfig
from gimbal_jax.model.checkpoint import CheckpointError, load_safetensors
from gimbal_jax.model.hf_config import load_config
from gimbal_jax.model.sharding import make_mesh, sharding_for
from gimbal_jax.model.step import abstract_model
from tests.model.rig import reordered

GOLDENS = Path(__file__).parents[1] / "goldens"
CASES = sorted(p.name for p in GOLDENS.iterdir())
INDEX = "model.safetensors.index.json"
NORM, ROUTER = "model.norm.weight", "model.layers.1.mlp.gate.weight"
EXPERT = "model.layers.2.mlp.experts.7.up_proj.weight"
ONE_DEVICE = MeshConfig()
Tensors = dict[str, np.ndarray]


def tensors_of(folder: Path) -> Tensors:
    return {name: array for path in sorted(folder.glob("*.safetensors")) for name, array in load_file(path).items()}


def load(folder: Path, mesh: MeshConfig = ONE_DEVICE, dtype=jnp.float32, placement=None) -> nnx.State:
    config = load_config(folder)
    _, abstract = abstract_model(config, dtype, make_mesh(mesh))
    if placement is None:
        placement = np.tile(np.arange(config.num_experts), (len(config.moe_layers), 1))
    return load_safetensors(folder, config, abstract, placement)


def values(state: nnx.State) -> dict[tuple, np.ndarray]:
    return {path: np.asarray(variable.get_value()) for path, variable in nnx.to_flat_state(state)}


def assert_equal(got: nnx.State, want: nnx.State) -> None:
    wanted = values(want)
    assert values(got).keys() == wanted.keys()
    for path, array in values(got).items():
        np.testing.assert_array_equal(array, wanted[path], err_msg=str(path))


@pytest.fixture
def copy(tmp_path) -> Callable[..., Path]:
    """Return a function that copies a golden folder, with tensors that another function changes in place."""

    def make(change: Callable[[Tensors], object] = lambda tensors: None, case: str = "base") -> Path:
        folder = tmp_path / "copy"
        shutil.copytree(GOLDENS / case, folder)
        tensors = tensors_of(folder)
        change(tensors)
        if (folder / "model.safetensors").exists():
            save_file(tensors, folder / "model.safetensors")
        return folder

    return make


@pytest.mark.parametrize("dp,tp", [(1, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("case", CASES)
def test_every_parameter_lands_in_its_shards_and_every_tensor_is_used(case, dp, tp):
    """Sizes and the sum of all values are equal, so each tensor is read one time, apart from copies of KV heads."""
    state = load(GOLDENS / case, MeshConfig(dp, tp))
    mesh = make_mesh(MeshConfig(dp, tp))
    for path, variable in nnx.to_flat_state(state):
        array = variable.get_value()
        assert array.sharding == sharding_for(variable.get_metadata("axes"), array.shape, mesh), path
    copies = max(1, tp // load_config(GOLDENS / case).num_kv_heads)
    tensors = [
        tensor
        for name, tensor in tensors_of(GOLDENS / case).items()
        for _ in range(copies if name.split(".")[-2] in ("k_proj", "v_proj") else 1)
    ]
    arrays = values(state).values()
    assert sum(a.size for a in arrays) == sum(t.size for t in tensors)
    np.testing.assert_allclose(sum(np.float64(a).sum() for a in arrays), sum(np.float64(t).sum() for t in tensors))


def test_expert_weights_stack_gate_then_up_in_slot_order():
    tensors, placement = tensors_of(GOLDENS / "base"), np.array([[3, 1, 2, 0, 4, 5, 6, 7]] * 3)
    got = values(load(GOLDENS / "base", placement=placement))
    for slot, expert in enumerate([3, 1, 2, 0]):
        prefix = f"model.layers.0.mlp.experts.{expert}"
        parts = [tensors[f"{prefix}.{part}_proj.weight"].T for part in ("gate", "up")]
        np.testing.assert_array_equal(got["layers", 0, "mlp", "gate_up"][slot], np.concatenate(parts, axis=1))
        np.testing.assert_array_equal(got["layers", 0, "mlp", "down"][slot], tensors[f"{prefix}.down_proj.weight"].T)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("case", ["attention_bias", "base", "kv1"])
def test_every_rank_holds_its_query_heads_with_their_keys_and_values(case, tp):
    config, tensors = load_config(GOLDENS / case), tensors_of(GOLDENS / case)
    got = values(load(GOLDENS / case, MeshConfig(1, tp)))
    groups, shared = max(config.num_kv_heads, tp), config.num_heads // config.num_kv_heads
    for kind in ["weight", "bias"] if config.attention_bias else ["weight"]:
        q, k, v = (
            tensors[f"model.layers.1.self_attn.{part}_proj.{kind}"].reshape(-1, config.head_dim, *rest)
            for part in "qkv"
            for rest in [() if kind == "bias" else (config.hidden_size,)]
        )
        qkv = got["layers", 1, "attention", "qkv" if kind == "weight" else "qkv_bias"]
        for group, heads in enumerate(np.split(np.arange(config.num_heads), groups)):
            (kv_head,) = {head // shared for head in heads}
            for place, head in enumerate([*q[heads], k[kv_head], v[kv_head]]):
                np.testing.assert_array_equal(qkv[..., group, place, :], head.T)


def test_gate_and_up_of_a_dense_layer_are_stacked():
    tensors = tensors_of(GOLDENS / "sparse_step")
    gate_up = values(load(GOLDENS / "sparse_step", MeshConfig(2, 2)))["layers", 0, "mlp", "gate_up"]
    for place, part in enumerate(("gate", "up")):
        np.testing.assert_array_equal(gate_up[:, place], tensors[f"model.layers.0.mlp.{part}_proj.weight"].T)


@pytest.mark.parametrize("case", ["base", "sparse_step"])
def test_a_placement_permutes_expert_weights_and_nothing_else(case):
    config = load_config(GOLDENS / case)
    rng = np.random.default_rng(0)
    slot_of_expert_LE = np.array([rng.permutation(config.num_experts) for _ in config.moe_layers])
    got = load(GOLDENS / case, MeshConfig(2, 2), placement=slot_of_expert_LE)
    plain = load(GOLDENS / case, MeshConfig(2, 2))
    assert_equal(got, reordered(plain, config, np.argsort(slot_of_expert_LE, axis=1)))


def test_an_indexed_checkpoint_equals_the_same_tensors_in_one_file(tmp_path):
    folder = tmp_path / "joined"
    shutil.copytree(GOLDENS / "no_norm_topk", folder, ignore=shutil.ignore_patterns("model*"))
    save_file(tensors_of(GOLDENS / "no_norm_topk"), folder / "model.safetensors")
    assert_equal(load(folder), load(GOLDENS / "no_norm_topk"))


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16, np.float64], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda t: jnp.dtype(t).name)
def test_other_float_types_are_converted(copy, stored, dtype):
    folder = copy(lambda tensors: tensors.update({name: t.astype(stored) for name, t in tensors.items()}))
    got, exact = values(load(folder, MeshConfig(2, 2), dtype)), values(load(GOLDENS / "base"))
    for path, array in got.items():
        assert array.dtype == dtype
        np.testing.assert_array_equal(array, exact[path].astype(stored).astype(dtype), err_msg=str(path))


def quantised(dtype) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({EXPERT: tensors[EXPERT].astype(dtype)})


REJECTED: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda t: t.pop(EXPERT), f"missing tensors: {EXPERT}"),
    "missing two": (lambda t: (t.pop(ROUTER), t.pop(NORM)), f"missing tensors: {ROUTER}, {NORM}"),
    "extra": (lambda t: t.update({"model.spare": t[NORM]}), "tensors that this model has no place for: model.spare"),
    "a layer too many": (
        lambda t: t.update({name.replace(".2.", ".3."): a for name, a in t.items() if "layers.2.self" in name}),
        "no place for: model.layers.3.self_attn.k_norm.weight",
    ),
    "misshapen": (
        lambda t: t.update({ROUTER: t[ROUTER].T.copy()}),
        f"{ROUTER} has shape (32, 8), the configuration requires (8, 32)",
    ),
    "int8": (quantised(np.int8), f"{EXPERT} has type I8; only"),
    "fp8": (quantised(ml_dtypes.float8_e4m3fn), f"{EXPERT} has type F8_E4M3; only"),
}


@pytest.mark.parametrize("change,message", REJECTED.values(), ids=REJECTED)
def test_wrong_tensors_are_rejected_and_named(copy, change, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(copy(change))


def test_one_error_names_all_wrong_tensors(copy):
    def change(tensors: Tensors) -> None:
        tensors["model.spare"] = tensors.pop(NORM)
        tensors[ROUTER] = tensors[ROUTER][:4]

    with pytest.raises(CheckpointError) as rejected:
        load(copy(change))
    for name in (NORM, "model.spare", ROUTER):
        assert name in str(rejected.value)


def test_many_missing_tensors_are_counted_not_listed(copy):
    with pytest.raises(CheckpointError) as rejected:
        load(copy(lambda tensors: [tensors.pop(name) for name in list(tensors) if "experts" in name]))
    assert "and 67 more" in str(rejected.value)
    assert str(rejected.value).count("experts") == 5


def test_a_truncated_file_is_rejected_and_named(copy):
    folder = copy()
    file = folder / "model.safetensors"
    for size in (file.stat().st_size - 1, 1000, 4, 0):
        with file.open("r+b") as opened:
            opened.truncate(size)
        with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or truncated"):
            load(folder)


def test_a_folder_without_weights_is_rejected(copy):
    folder = copy()
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        load(folder)


def test_a_missing_or_truncated_shard_is_rejected_and_named(copy):
    shard = copy(case="no_norm_topk") / "model-00002-of-00003.safetensors"
    with shard.open("r+b") as opened:
        opened.truncate(50_000)
    with pytest.raises(CheckpointError, match=f"{shard.name} is damaged or truncated"):
        load(shard.parent)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        load(shard.parent)


def test_an_index_with_a_tensor_in_no_file_is_rejected(copy):
    folder = copy(case="no_norm_topk")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.ghost"] = "model-00001-of-00003.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"in no file: model\.ghost"):
        load(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"metadata": {}}'])
def test_a_damaged_index_is_rejected_and_named(copy, text):
    folder = copy(case="no_norm_topk")
    (folder / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=re.escape(INDEX)):
        load(folder)


def test_progress_counts_parameters():
    config = load_config(GOLDENS / "base")
    _, abstract = abstract_model(config, jnp.float32, make_mesh(ONE_DEVICE))
    placement, seen = np.tile(np.arange(8), (3, 1)), []
    load_safetensors(GOLDENS / "base", config, abstract, placement, lambda done, total: seen.append((done, total)))
    total = len(nnx.to_flat_state(abstract))
    assert seen == [(done + 1, total) for done in range(total)]
