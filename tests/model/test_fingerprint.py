"""Fingerprints are equal for copies of a checkpoint and differ between checkpoints, within stated limits."""

import json
import os
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file, save_file

from gimbal_jax.config import MeshConfig
from gimbal_jax.model import fingerprint
from gimbal_jax.model.checkpoint import CheckpointError
from gimbal_jax.model.fingerprint import checkpoint_fingerprint
from gimbal_jax.model.hf_config import load_config
from gimbal_jax.model.loading import load_weights
from gimbal_jax.model.orbax_checkpoint import save_orbax
from gimbal_jax.model.sharding import make_mesh

GOLDENS = Path(__file__).parents[1] / "goldens"
TENSORS = sorted(load_file(GOLDENS / "base" / "model.safetensors"))


@pytest.fixture(scope="module")
def orbax(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("orbax")
    golden = GOLDENS / "base"
    save_orbax(folder, golden, *load_weights(golden, load_config(golden), make_mesh(MeshConfig()), jnp.float32))
    return folder


@pytest.fixture(params=["base", "no_norm_topk", "orbax"])
def original(request, orbax) -> Path:
    """A checkpoint in one file, one in several files, and one of Orbax."""
    return orbax if request.param == "orbax" else GOLDENS / request.param


def copy_of(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target / "elsewhere" / "copy", copy_function=shutil.copyfile)
    return target / "elsewhere" / "copy"


def tuned(folder: Path, *names: str) -> str:
    """Return the fingerprint of the base checkpoint with all values of these tensors changed a little."""
    folder.mkdir(exist_ok=True)
    tensors = load_file(GOLDENS / "base" / "model.safetensors")
    save_file({n: t * 1.01 if n in names else t for n, t in tensors.items()}, folder / "model.safetensors")
    shutil.copy(GOLDENS / "base" / "config.json", folder)
    return checkpoint_fingerprint(folder)


def test_copies_have_the_same_fingerprint(original, tmp_path):
    copy = copy_of(original, tmp_path)
    for path in copy.rglob("*"):
        os.utime(path, (10**9, 10**9))
    assert checkpoint_fingerprint(copy) == checkpoint_fingerprint(original)
    assert re.fullmatch(r"[0-9a-f]{16}", checkpoint_fingerprint(original))


def test_files_that_followers_do_not_read_do_not_count(original, tmp_path):
    copy = copy_of(original, tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "other.safetensors"):
        (copy / name).write_text("another")
    assert checkpoint_fingerprint(copy) == checkpoint_fingerprint(original)


def test_another_configuration_differs(original, tmp_path):
    copy = copy_of(original, tmp_path)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 12345.0}))
    assert checkpoint_fingerprint(copy) != checkpoint_fingerprint(original)


@pytest.mark.parametrize("name", [name for name in TENSORS if ".experts." not in name])
def test_changing_any_tensor_changes_the_fingerprint(tmp_path, name):
    assert tuned(tmp_path, name) != tuned(tmp_path)


@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
def test_changing_all_experts_of_a_layer_changes_the_fingerprint(tmp_path, part, monkeypatch):
    """A change of one expert may not change it, because the experts of a layer share one sample."""
    monkeypatch.setattr(fingerprint, "SAMPLE_BYTES", 256)  # less than half of an expert, as with models of full size
    experts = [name for name in TENSORS if re.fullmatch(rf"model\.layers\.1\..*experts\.\d\.{part}\.weight", name)]
    assert len(experts) == 8
    original = tuned(tmp_path)
    assert tuned(tmp_path, *experts) != original
    # A small tensor's sample may reach into a second one.
    assert 1 <= sum(tuned(tmp_path, expert) != original for expert in experts) <= 2


def test_another_name_or_type_differs(tmp_path):
    found = {tuned(tmp_path)}
    for name, kind in (("model.norm.w", "float32"), ("model.norm.weight", "int32")):
        tensors = load_file(tmp_path / "model.safetensors")
        tensors[name] = tensors.pop("model.norm.weight").view(kind)
        save_file(tensors, tmp_path / "model.safetensors")
        found.add(checkpoint_fingerprint(tmp_path))
        tuned(tmp_path)
    assert len(found) == 3


@pytest.mark.parametrize("whole_bytes", [fingerprint.WHOLE_BYTES, fingerprint.SAMPLE_BYTES])
def test_another_byte_at_either_end_of_any_orbax_file_differs(orbax, tmp_path, monkeypatch, whole_bytes):
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", whole_bytes)
    copy = copy_of(orbax, tmp_path)
    files = [path for path in (copy / "weights").rglob("*") if path.is_file() and path.stat().st_size]
    assert any(path.stat().st_size > 20_000 for path in files)
    for path in files:
        content = path.read_bytes()
        for place in (0, len(content) - 1):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            assert checkpoint_fingerprint(copy) != checkpoint_fingerprint(orbax), (path.name, place)
        path.write_bytes(content)
    assert checkpoint_fingerprint(copy) == checkpoint_fingerprint(orbax)


def test_a_large_file_is_not_read_whole(tmp_path):
    """The file is sparse and has half a terabyte. Reading all of it would take hours."""
    shape, size = [500, 5 * 10**8], 5 * 10**11
    header = json.dumps({"a": {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint_fingerprint(tmp_path) == checkpoint_fingerprint(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00", b"\xff" * 100, (5).to_bytes(8, "little") + b"[1,2]", (8).to_bytes(8, "little") + b'{"a": 1}'],
)
def test_damaged_files_are_named(tmp_path, content):
    copy = copy_of(GOLDENS / "no_norm_topk", tmp_path)
    damaged = copy / "model-00002-of-00003.safetensors"
    damaged.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{damaged.name} is damaged or truncated"):
        checkpoint_fingerprint(copy)
    damaged.unlink()
    with pytest.raises(CheckpointError, match=damaged.name):
        checkpoint_fingerprint(copy)
