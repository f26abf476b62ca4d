"""The KV pool is what the devices have left, as the server asks jax."""

from dataclasses import replace
from typing import Any

import jax
import pytest

from gimbal_jax.config import EngineConfig, MeshConfig, PlacementConfig, ServerConfig
from gimbal_jax.model.hf_config import PRESETS
from gimbal_jax.model.memory import device_bytes, migration_bytes
from gimbal_jax.serving.runtime.batch import step_buckets
from gimbal_jax.serving.runtime.kv_pool import size_kv_pool

MODEL = PRESETS["Qwen3-30B-A3B"]
CONFIG = ServerConfig(MeshConfig(2, 2), EngineConfig(page_size=64, max_rows=128, token_budget=8192, tile=64))


def gpu(limit: int, compute_capability: str = "9.0") -> Any:
    """A device that says so of itself."""

    class Device:
        platform = "gpu"

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": limit, "bytes_in_use": 0}

    device = Device()
    device.compute_capability = compute_capability  # type: ignore[attr-defined]
    return device


@pytest.mark.parametrize(("capability", "backend"), [("9.0", "mosaic"), ("8.0", "xla")])
def test_gpus_give_all_their_remaining_memory(capability, backend):
    limit = 76_000_000_000
    # Large tiles have few logits, so that the experts' temporaries, which differ, decide.
    config = replace(CONFIG, engine=replace(CONFIG.engine, tile=512))
    bucket = step_buckets(config.engine, 2)[-1]
    needed = device_bytes(MODEL, config, bucket, backend)
    assert (
        needed.step.total != device_bytes(MODEL, config, bucket, "xla" if backend == "mosaic" else "mosaic").step.total
    )
    sized, said = size_kv_pool(MODEL, config, gpu(limit, capability))
    pages = sized.engine.num_pages
    assert needed.fixed + pages * needed.page <= limit < needed.fixed + (pages + 1) * needed.page
    assert sized == replace(config, engine=replace(config.engine, num_pages=pages))
    assert f"{pages:,} pages, {pages * 64:,} tokens" in said
    assert "76.0 GB of each device: 16.0 weights" in said


def test_static_placement_leaves_the_buffers_of_moves_to_the_cache():
    limit = 76_000_000_000
    static = replace(CONFIG, placement=PlacementConfig("static"))
    moving, still, started = (
        size_kv_pool(MODEL, config, gpu(limit), start_placement=start)[0].engine.num_pages
        for config, start in ((CONFIG, False), (static, False), (static, True))
    )
    page = device_bytes(MODEL, CONFIG, (128, 128)).page
    assert (still - moving) * page == pytest.approx(migration_bytes(MODEL, CONFIG.mesh, 2), abs=page)
    assert started == moving  # experts move to the start placement


def test_cpus_keep_the_default():
    assert jax.devices()[0].memory_stats() is None
    sized, said = size_kv_pool(MODEL, CONFIG, jax.devices()[0])
    assert sized == CONFIG
    assert said == "KV cache of an engine: 1,024 pages, 65,536 tokens"


def test_too_little_memory_is_an_error_with_advice():
    with pytest.raises(ValueError) as refused:
        size_kv_pool(MODEL, CONFIG, gpu(16 * 10**9))
    for part in ("the model does not fit: each device may use 16.0 GB", "16.0 for weights", "--tp", "--token-budget"):
        assert part in str(refused.value)
