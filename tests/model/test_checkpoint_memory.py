"""Loading needs little host memory beyond the devices' buffers, independent of the size of the checkpoint."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from gimbal_jax.config import MeshConfig
from gimbal_jax.model.checkpoint import source_of
from gimbal_jax.model.hf_config import load_config
from gimbal_jax.model.sharding import make_mesh
from gimbal_jax.model.step import abstract_model

ROOT = Path(__file__).parents[2]
MOST = 1.3
"""Most host memory, in multiples of the largest parameter."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Iterator[tuple[Path, int]]:
    """A checkpoint of about 250 MB with the proportions of Qwen3-30B-A3B, and the bytes of its largest parameter."""
    folder = tmp_path_factory.mktemp("large")
    small = json.loads((ROOT / "tests/goldens/base/config.json").read_text())
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "num_local_experts": 32, "num_hidden_layers": 4}
    (folder / "config.json").write_text(json.dumps(small | sizes | {"vocab_size": 25_600}))
    config = load_config(folder)
    _, abstract = abstract_model(config, jnp.bfloat16, make_mesh(MeshConfig()))
    flat = nnx.to_flat_state(abstract)
    sources = [source_of(path, config, 1) for path, _ in flat]
    tensors = {
        tensor.name: np.ones(tensor.shape, ml_dtypes.bfloat16)
        for source in sources
        for group in source.tensors
        for tensor in group
    }
    save_file(tensors, folder / "model.safetensors")
    assert sum(tensor.nbytes for tensor in tensors.values()) > 240e6
    yield folder, max(shape.size * shape.dtype.itemsize for shape in (v.get_value() for _, v in flat))
    (folder / "model.safetensors").unlink()


def anonymous_bytes(pid: int) -> int | None:
    """Return a process's memory without file pages, which the system may drop; None if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def host_peak(folder: Path, dp: int, tp: int) -> int:
    """Return the peak memory of the loading process beyond its memory before the load and the devices' buffers."""
    command = [sys.executable, "-m", "tests.model.loading_process", str(folder), str(dp), str(tp)]
    # With this threshold, freed memory goes back to the system immediately.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    samples = []
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        while (now := anonymous_bytes(process.pid)) is not None:
            samples.append((time.monotonic(), now))
            time.sleep(0.0005)
        output = process.communicate()[0]
    assert process.returncode == 0
    moments = [(float(at), int(held)) for at, held in (line.split() for line in output.splitlines())]
    before = [now for at, now in samples if at < moments[0][0]][-1]
    # A shard counts as held from the start of its transfer.
    held_at_end = [held for _, held in moments[1:]] + [moments[-1][1]]
    place = np.searchsorted([at for at, _ in moments], [at for at, _ in samples], side="right") - 1
    return max(now - before - held_at_end[i] for (_, now), i in zip(samples, place, strict=True) if i >= 0)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dp,tp", [(1, 1), (2, 2)])
def test_host_peak_is_at_most_1_3_times_the_largest_parameter(checkpoint, dp, tp):
    folder, largest = checkpoint
    peak = host_peak(folder, dp, tp)
    print(f"{dp}x{tp}: {peak / 1e6:.1f} MB beyond what the devices hold, {peak / largest:.2f} of the largest parameter")
    assert peak <= MOST * largest
