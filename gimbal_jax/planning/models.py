"""The model that a user means."""

from __future__ import annotations

from pathlib import Path

from gimbal_jax.config import ModelConfig
from gimbal_jax.model.hf_config import PRESETS, load_config


def find_model(text: str) -> tuple[str, ModelConfig]:
    """Name and architecture of a published model, in any case, or of a checkpoint folder; ValueError if neither."""
    for name, model in PRESETS.items():
        if text.lower() == name.lower():
            return name, model
    if Path(text).is_dir():
        return text, load_config(Path(text))
    raise ValueError(f"{text} is no folder, and no model that is known by name: {', '.join(PRESETS)}")
