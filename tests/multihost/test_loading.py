"""Loading on a mesh of several processes: each reads only its own shards, and together they hold what one would."""

import math
from collections import Counter
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file

from gimbal_jax.config import MeshConfig
from gimbal_jax.model.checkpoint import SafetensorsFolder
from gimbal_jax.model.hf_config import load_config
from gimbal_jax.model.loading import load_weights
from gimbal_jax.model.sharding import make_mesh
from tests.multihost.processes import on_mesh
from tests.multihost.shards import digests, merged

GOLDENS = Path(__file__).parents[1] / "goldens"
CASES = ("base", "kv1", "mlp_only")
MESHES = ((2, 2), (4, 1), (1, 4))
PARTS = {"embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
"""Parts of the names of tensors that are split over tp or over experts."""


def load_all():
    """For each checkpoint and mesh: digests of this process's shards, and how often it read the size of each tensor."""
    read, answers = SafetensorsFolder.read, {}
    for case in CASES:
        for dp, tp in MESHES:
            count: Counter[str] = Counter()

            def counted(folder, name, rows, count=count):
                found = read(folder, name, rows)
                count[name] += found.size
                return found

            mesh = make_mesh(MeshConfig(dp, tp))
            with mock.patch.object(SafetensorsFolder, "read", counted):
                weights, _ = load_weights(GOLDENS / case, load_config(GOLDENS / case), mesh, jnp.float32)
            answers[f"{case} {dp} {tp}"] = digests(weights), count
    return answers


@pytest.fixture(scope="module", params=[(2, 2), (4, 1)], ids=str)
def loaded(request):
    """The answers of each process, and the devices per process."""
    processes, devices = request.param
    return on_mesh(load_all, processes=processes, devices=devices), devices


@pytest.mark.parametrize("dp,tp", MESHES)
@pytest.mark.parametrize("case", CASES)
def test_shards_equal_those_of_one_process(loaded, case, dp, tp):
    answers, _ = loaded
    weights, _ = load_weights(GOLDENS / case, load_config(GOLDENS / case), make_mesh(MeshConfig(dp, tp)), jnp.float32)
    assert merged([answer[f"{case} {dp} {tp}"][0] for answer in answers]) == digests(weights)


@pytest.mark.parametrize("dp,tp", MESHES)
@pytest.mark.parametrize("case", CASES)
def test_each_process_reads_only_what_its_shards_need_and_once(loaded, case, dp, tp):
    """Each expert is read once. Rows of a tensor split over tp are read by each process that has them, the rest by all.

    A tensor that is split along the rows of the file is read whole for each part, and a KV head for each of its copies.
    """
    answers, devices = loaded
    config = load_config(GOLDENS / case)
    sizes = {name: math.prod(array.shape) for name, array in load_file(GOLDENS / case / "model.safetensors").items()}
    for process, answer in enumerate(answers):
        ranks = range(process * devices, (process + 1) * devices)
        columns = {rank % tp for rank in ranks}
        for name, size in sizes.items():
            kind = name.removesuffix(".weight").rpartition(".")[2]
            if ".experts." in name:
                expert = int(name.split(".experts.")[1].split(".")[0])
                times = float(expert // (config.num_experts // (dp * tp)) in ranks)
            elif kind in ("o_proj", "down_proj"):
                times = len(columns)
            elif kind in ("k_proj", "v_proj"):
                times = len(columns) / min(tp, config.num_kv_heads)
            else:
                times = len(columns) / tp if kind in PARTS else 1
            assert answer[f"{case} {dp} {tp}"][1].get(name, 0) == times * size, (process, name)
