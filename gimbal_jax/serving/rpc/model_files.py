"""Files of the checkpoint folder that clients need: tokenizer, its files as one archive, sampling defaults."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gimbal_jax.model.hf_config import SIDE_FILES
from gimbal_jax.serving.text.tokenizer import Tokenizer, load_tokenizer

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class ModelFiles:
    """One checkpoint folder, as clients see it."""

    name: str
    """Name of the model for clients."""
    folder: Path
    tokenizer: Tokenizer | None
    archive: bytes
    """Zip of the tokenizer's files; empty without a tokenizer."""
    sampling_defaults: dict[str, Any]
    """Recommendation of generation_config.json. Clients apply it, since an unset field means vLLM's default."""


def load_model_files(folder: Path, name: str | None = None) -> ModelFiles:
    """Load the files of a folder. ``name`` is the folder's own by default. Raises ValueError for a bad tokenizer."""
    folder = folder.resolve()
    tokenizer = load_tokenizer(folder)
    generation_config = folder / "generation_config.json"
    defaults = json.loads(generation_config.read_text("utf-8")) if generation_config.is_file() else {}
    return ModelFiles(
        name=name or folder.name,
        folder=folder,
        tokenizer=tokenizer,
        archive=_archive(folder) if tokenizer else b"",
        sampling_defaults={key: defaults[key] for key in SAMPLING_DEFAULTS if defaults.get(key) is not None},
    )


def _archive(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in SIDE_FILES:
            if (folder / name).is_file():
                # A ZipInfo has a fixed date, so equal files give equal bytes.
                archive.writestr(zipfile.ZipInfo(name), (folder / name).read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
