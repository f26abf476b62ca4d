"""Weights are held once: what a start adds to the process's memory is what the arithmetic says."""

import sys

import pytest
from rich.console import Console

from benchmarks.memory import MB, stages_of, table
from gimbal_jax.config import EngineConfig, MeshConfig, ServerConfig
from tests.model.test_checkpoint_memory import checkpoint

__all__ = ["checkpoint"]  # the fixture

OVERHEAD = 60 * MB
"""Of jax's first arrays and of freed memory that malloc keeps; a second copy of the weights would be 500."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_and_pages_are_held_once(checkpoint):
    folder, _ = checkpoint
    engine = EngineConfig(max_model_len=64, page_size=16, num_pages=1000, max_rows=8, tile=8, token_budget=16)
    libraries, loaded, warm, trimmed = stages_of(folder, ServerConfig(MeshConfig(), engine), "float32", 1)
    assert loaded.expected is not None and loaded.expected > 250 * MB
    assert loaded.expected <= loaded.memory.own - libraries.memory.own <= loaded.expected + OVERHEAD
    assert trimmed.memory.own <= warm.memory.own
    console = Console(width=120)
    with console.capture() as shown:
        console.print(table([libraries, loaded, warm, trimmed]))
    assert f"{loaded.expected / MB:,.0f}" in shown.get()
