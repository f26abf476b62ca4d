"""Program that loads a checkpoint on virtual CPU devices and prints their memory before and after each transfer.

Usage: python -m tests.model.loading_process FOLDER DP TP
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gimbal_jax.config import MeshConfig
from gimbal_jax.model.checkpoint import load_safetensors
from gimbal_jax.model.hf_config import load_config
from gimbal_jax.model.sharding import make_mesh
from gimbal_jax.model.step import abstract_model


def report() -> None:
    """Print the time and the bytes in device buffers; arrays may share buffers."""
    shards = [shard.data for array in jax.live_arrays() for shard in array.addressable_shards]
    held = {shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}
    print(time.monotonic(), sum(held.values()), flush=True)


def reported(transfer: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def wrapper(*args: Any) -> jax.Array:
        report()
        array = jax.block_until_ready(transfer(*args))
        report()
        return array

    return wrapper


def main(folder: Path, mesh: MeshConfig) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", mesh.ranks)
    config = load_config(folder)
    _, abstract = abstract_model(config, jnp.bfloat16, make_mesh(mesh))
    jax.block_until_ready(jax.device_put(np.zeros(1)))
    placement = np.tile(np.arange(config.num_experts), (len(config.moe_layers), 1))
    time.sleep(0.2)  # so that the parent measures the memory before the load
    report()
    jax.device_put = reported(jax.device_put)
    load_safetensors(folder, config, abstract, placement)


if __name__ == "__main__":
    main(Path(sys.argv[1]), MeshConfig(int(sys.argv[2]), int(sys.argv[3])))
