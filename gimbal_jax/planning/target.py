"""Devices to compile for that are not there: XLA needs their facts only, no driver and no GPU.

The wheels ``jax-cuda13-plugin``, ``jax-cuda13-pjrt``, ``nvidia-cuda-nvcc`` and ``nvidia-nvvm`` must be installed, and
the process must run with ``JAX_PLATFORMS=cpu``: without it the plugin looks for a driver and disables itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.experimental import topologies

from gimbal_jax.planning.hardware import Gpu


def compile_only_devices(gpu: Gpu, count: int, nodes: int = 1) -> Sequence[jax.Device]:
    """Return ``count`` GPUs, spread over ``nodes``. OSError with the way out if XLA has no CUDA compiler.

    Trace under ``jax.default_device(devices[0])``, because libraries choose a kernel by the default device.
    """
    shape = f"1x{nodes}x{count // nodes}"
    try:
        topology = topologies.get_topology_desc("", "cuda", target_config=_target_config(gpu), topology=shape)
    except Exception as error:
        raise OSError(
            "XLA has no CUDA compiler here: run `make cuda-check`, which installs one, or set JAX_PLATFORMS=cpu"
        ) from error
    return topology.devices


def _target_config(gpu: Gpu) -> str:
    """Return the facts as XLA's GpuTargetConfigProto in text form."""
    major, minor = gpu.compute_capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  threads_per_core_limit: {gpu.threads_per_core} fpus_per_core: {gpu.fpus_per_core}
  shared_memory_per_block: 49152 shared_memory_per_core: {gpu.shared_memory_per_core}
  shared_memory_per_block_optin: {gpu.shared_memory_per_block}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  core_count: {gpu.cores} clock_rate_ghz: {gpu.clock_ghz} l2_cache_size: {gpu.l2_bytes}
  memory_bandwidth: {int(gpu.bandwidth)} device_memory_size: {gpu.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{gpu.description}"
"""
