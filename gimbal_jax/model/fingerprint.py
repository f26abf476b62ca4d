"""Telling checkpoints apart without reading them: by what they say of themselves, and a sample of what they hold."""

from __future__ import annotations

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gimbal_jax.model.checkpoint import CheckpointError, weight_files
from gimbal_jax.model.orbax_checkpoint import WEIGHTS, is_orbax

SAMPLE_BYTES = 1024
"""Read at each place of a large file."""
SAMPLES = 16
"""Places of an Orbax file, whose content nothing tells."""
WHOLE_BYTES = 2**20
"""Orbax files up to this size are read whole."""
THREADS = 16
"""A network's delay is waited for so often at once."""
EXPERT = re.compile(r"\.experts\.\d+\.")


def checkpoint_fingerprint(folder: Path) -> str:
    """16 hex digits that are the same for copies of a checkpoint, wherever and whenever they were made.

    They follow from config.json and the files of the weights: names, sizes, headers, and samples. Of a safetensors file
    that is a sample of every tensor, but of one expert for all that it holds of a layer: another fine-tune shows, an
    edit of single rows or experts may not. Two conversions to Orbax of one original are no copies of each other.
    What only clients need does not count: tokenizer, chat template, recommended sampling.

    Raises CheckpointError for files that are missing or damaged.
    """
    folder, digest = folder.resolve(), hashlib.sha256()
    orbax = is_orbax(folder)
    files = sorted(path for path in (folder / WEIGHTS).rglob("*") if path.is_file()) if orbax else weight_files(folder)
    try:
        digest.update((folder / "config.json").read_bytes())
        with ThreadPoolExecutor(THREADS) as pool:
            found = list(pool.map(_orbax_digest if orbax else _safetensors_digest, files))
        for path, content in zip(files, found, strict=True):
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode() + content)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    return digest.hexdigest()[:16]


def _safetensors_digest(path: Path) -> bytes:
    """Of the header, which is JSON after its length in 8 bytes, and of the middle of tensors."""
    with path.open("rb", buffering=0) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise CheckpointError(f"{path} is damaged or truncated")
        header = file.read(length)
        try:
            entries = json.loads(header)
            entries.pop("__metadata__", None)
            middles = {name: sum(entry["data_offsets"]) // 2 for name, entry in entries.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged or truncated: {error!r}") from error
        alike: dict[str, list[int]] = {}
        for name, middle in middles.items():
            alike.setdefault(EXPERT.sub(".", name), []).append(middle)
        digest = hashlib.sha256(header)
        for places in alike.values():
            file.seek(8 + length + places[len(places) // 2])
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()


def _orbax_digest(path: Path) -> bytes:
    """Of the whole file, or of places that are evenly spaced."""
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        if size <= WHOLE_BYTES:
            return hashlib.sha256(file.read()).digest()
        digest = hashlib.sha256()
        for place in range(SAMPLES):
            file.seek(place * (size - SAMPLE_BYTES) // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()
