"""The real server on two CPU devices in this process, shared by the scripts that measure it.

Each rank has a device of one thread, so that a rank with more work takes longer. The model is the demo model with
experts several times as wide. Its outputs are equal, but the experts take most of the time, as in a large model.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from gimbal_jax.config import EngineConfig, MeshConfig, ModelConfig, PlacementConfig, ServerConfig
from gimbal_jax.model.demo_model import write_demo_model
from gimbal_jax.model.hf_config import load_config
from gimbal_jax.model.loading import load_weights
from gimbal_jax.model.sharding import make_mesh
from gimbal_jax.serving.engine.runner import Progress
from gimbal_jax.serving.runtime.device_runner import DeviceRunner
from research.store import OUT

MESH = MeshConfig(dp=2, tp=1)
ENGINE = EngineConfig(max_model_len=256, num_pages=512, max_rows=32, token_budget=256, max_queue=100_000)
CONFIG = ServerConfig(MESH, ENGINE, placement=PlacementConfig("static"))


def use_cpu_devices() -> None:
    """Make jax use two virtual CPU devices of one thread each. Call it before anything else uses jax's devices."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={MESH.ranks} --xla_cpu_multi_thread_eigen=false"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", str(OUT / "compile-cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def demo_weights_on(mesh_config: MeshConfig) -> tuple[ModelConfig, Mesh, nnx.State, np.ndarray]:
    """Return the demo model, its mesh, its weights in float32 on that mesh, and the slot of each expert."""
    folder = OUT / "demo-model"
    if not (folder / "config.json").exists():
        write_demo_model(folder)
    model, mesh = load_config(folder), make_mesh(mesh_config)
    return model, mesh, *load_weights(folder, model, mesh, "float32")


def demo_runner(
    config: ServerConfig, expert_width: int, progress: Progress = lambda done, total: None
) -> tuple[ModelConfig, DeviceRunner]:
    """Return the demo model with experts ``expert_width`` times as wide, and its runner, compiled for ``config``."""
    model, mesh, weights, slot_of_expert_LE = demo_weights_on(config.mesh)
    model = widen_experts(model, weights, expert_width)
    runner = DeviceRunner(model, config, mesh, weights, slot_of_expert_LE, "float32")
    runner.warm_up(progress)
    return model, runner


def widen_experts(model: ModelConfig, weights: nnx.State, times: int) -> ModelConfig:
    """Repeat the hidden units of every expert ``times`` times, each with its share of the output.

    Each expert still computes its old function.
    """
    for layer in model.moe_layers:
        mlp: Any = weights["layers"][layer]["mlp"]
        gate, up = jnp.split(mlp["gate_up"].get_value(), 2, axis=-1)
        mlp["gate_up"].set_value(jnp.concatenate([gate] * times + [up] * times, axis=-1))
        mlp["down"].set_value(jnp.concatenate([mlp["down"].get_value() / times] * times, axis=1))
    return replace(model, moe_intermediate_size=times * model.moe_intermediate_size)
