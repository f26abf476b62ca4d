"""Models that a mesh can be planned for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gimbal_jax.config import ModelConfig
from gimbal_jax.model.hf_config import PRESETS, load_config

HUB_IDS = {
    "Qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B",
    "Qwen3-235B-A22B": "Qwen/Qwen3-235B-A22B",
    "Qwen3-Coder-480B-A35B": "Qwen/Qwen3-Coder-480B-A35B-Instruct",
}
"""Id on the Hugging Face hub of each model in ``PRESETS``."""


@dataclass(frozen=True)
class PlannedModel:
    """A model to plan for."""

    name: str
    source: str
    """Hub id or folder, as ``gimbal serve`` takes it."""
    config: ModelConfig


def find_model(text: str) -> PlannedModel:
    """Find a published model by its name or hub id, in any case, or a checkpoint folder. ValueError if it is none."""
    for name, config in PRESETS.items():
        if text.lower() in (name.lower(), HUB_IDS[name].lower()):
            return PlannedModel(name, HUB_IDS[name], config)
    if Path(text).is_dir():
        return PlannedModel(text, text, load_config(Path(text)))
    raise ValueError(
        f"{text} is not a folder, nor a published model known by name: {', '.join(PRESETS)}, "
        f"or by hub id: {', '.join(HUB_IDS.values())}"
    )
