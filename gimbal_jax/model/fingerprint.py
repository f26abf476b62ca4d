"""Fingerprints that distinguish checkpoints without reading all of them: a digest of metadata and samples."""

from __future__ import annotations

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gimbal_jax.model.checkpoint import CheckpointError, weight_files
from gimbal_jax.model.orbax_checkpoint import WEIGHTS, is_orbax

SAMPLE_BYTES = 1024
"""Bytes to read at each sampled place of a file."""
SAMPLES = 16
"""Evenly spaced places to sample in a large Orbax file, because the places of its arrays are not known."""
WHOLE_BYTES = 2**20
"""Largest Orbax file in bytes that is read whole."""
THREADS = 16
"""Files to read in parallel, because network file systems have high latency."""
EXPERT = re.compile(r"\.experts\.\d+\.")


def checkpoint_fingerprint(folder: Path) -> str:
    """Return 16 hex digits that are equal for copies of a checkpoint and differ between checkpoints.

    They depend on config.json and on the names, sizes, headers and samples of the weight files. Place and time of a
    copy do not matter. Files that only clients need do not count: tokenizer, chat template and recommended sampling.

    A safetensors file gives one sample of each tensor, and one sample for all experts of a layer that it holds. Thus
    another fine-tune has another fingerprint, but an edit of single rows or experts may not. Two conversions of one
    original to Orbax have different fingerprints.

    Raises:
      CheckpointError: a file is missing or damaged.
    """
    folder = folder.resolve()
    digest = hashlib.sha256()
    orbax = is_orbax(folder)
    files = sorted(path for path in (folder / WEIGHTS).rglob("*") if path.is_file()) if orbax else weight_files(folder)
    try:
        digest.update((folder / "config.json").read_bytes())
        with ThreadPoolExecutor(THREADS) as pool:
            contents = list(pool.map(_orbax_digest if orbax else _safetensors_digest, files))
        for path, content in zip(files, contents, strict=True):
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode() + content)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    return digest.hexdigest()[:16]


def _safetensors_digest(path: Path) -> bytes:
    """Return a digest of a file's header and of samples from the middle of its tensors.

    The header is JSON, and its length stands before it in 8 bytes.
    """
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
        # Tensors whose names differ only in the expert share one sample, so that few places are read.
        alike: dict[str, list[int]] = {}
        for name, middle in middles.items():
            alike.setdefault(EXPERT.sub(".", name), []).append(middle)
        digest = hashlib.sha256(header)
        for places in alike.values():
            file.seek(8 + length + places[len(places) // 2])
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()


def _orbax_digest(path: Path) -> bytes:
    """Return a digest of the whole file, or of evenly spaced samples of a large one."""
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        if size <= WHOLE_BYTES:
            return hashlib.sha256(file.read()).digest()
        digest = hashlib.sha256()
        for place in range(SAMPLES):
            file.seek(place * (size - SAMPLE_BYTES) // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()
