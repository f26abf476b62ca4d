"""The number of KV pages of an engine: as many as its devices have memory left for."""

from __future__ import annotations

from dataclasses import replace

import jax

from gimbal_jax.config import EngineConfig, ModelConfig, ServerConfig
from gimbal_jax.model.memory import GB, device_bytes
from gimbal_jax.pallas_kernels import backend_of
from gimbal_jax.serving.runtime.batch import step_buckets


def size_kv_pool(
    model: ModelConfig, config: ServerConfig, device: jax.Device, *, start_placement: bool = False
) -> tuple[ServerConfig, str]:
    """Return the settings with as many KV pages as such devices hold, and a line that reports it.

    ``start_placement``: see ``device_bytes``.
    On CPUs, where jax does not report how much memory the process may take, the settings stay unchanged. Raises
    ValueError, with advice, if the memory does not suffice.
    """
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None:
        return config, _pages_message(config.engine)
    bucket = step_buckets(config.engine, config.mesh.tp)[-1]
    needed = device_bytes(model, config, bucket, backend_of(device), start_placement=start_placement)
    try:
        engine = replace(config.engine, num_pages=needed.kv_pages(limit))
    except ValueError as error:
        raise ValueError(
            f"the model does not fit: {error}. More devices would help (--dp, --tp), or less of --max-model-len, "
            "--max-rows or --token-budget; `gimbal mesh plan` compares"
        ) from None
    parts = (
        (needed.weights.total, "weights"),
        (needed.step.total, "a step"),
        (needed.migration + needed.tables, "migration and tables"),
        (engine.num_pages * needed.page, "KV cache"),
    )
    sizes = ", ".join(f"{size / GB:.1f} {name}" for size, name in parts)
    return replace(config, engine=engine), f"{_pages_message(engine)}; {limit / GB:.1f} GB of each device: {sizes}"


def _pages_message(engine: EngineConfig) -> str:
    return f"KV cache of an engine: {engine.num_pages:,} pages, {engine.num_pages * engine.page_size:,} tokens"
