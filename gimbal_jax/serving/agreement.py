"""What processes that serve together must have in common, as short texts by name."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gimbal_jax.config import ModelConfig, ServerConfig
from gimbal_jax.version import __version__

PACKAGE = Path(__file__).parents[1]
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokamax", "jax-cuda13-plugin", "jax-cuda13-pjrt")
"""What takes part in making a program; absent ones count as absent."""
ABSENT = "none"
MAX_LENGTH = 80
"""Longer texts are told apart by their hash."""


def facts_of(
    model: ModelConfig, config: ServerConfig, checkpoint: str, options: Mapping[str, object]
) -> dict[str, str]:
    """What all processes must agree on before they compute together.

    That is: versions, this package's own files, the architecture, mesh and engines, how many experts a migration moves,
    the checkpoint's fingerprint, and ``options`` that every process acts on. Not what only the leader decides by.
    """
    found: dict[str, object] = {
        "gimbal_jax": __version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: installed_version(name) for name in PACKAGES},
        "checkpoint": checkpoint,
        **options,
        **dict(_flat("model", asdict(model))),
        **dict(_flat("mesh", asdict(config.mesh))),
        **dict(_flat("engine", asdict(config.engine))),
        "placement.rows_per_pair": config.placement.rows_per_pair,
        "source files": sources_digest(PACKAGE)[:16],
    }
    return {name: _short(value) for name, value in found.items()}


def differences(process: int, facts: Mapping[str, str], leader_facts: Mapping[str, str]) -> list[str]:
    """Where the facts of a process are not the leader's, each by name with both values."""
    return [
        f"{name}: {leader_facts.get(name, ABSENT)} in process 0, {facts.get(name, ABSENT)} in process {process}"
        for name in dict.fromkeys((*leader_facts, *facts))
        if leader_facts.get(name, ABSENT) != facts.get(name, ABSENT)
    ]


def installed_version(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def sources_digest(folder: Path) -> str:
    """SHA-256 of the names and contents of all files of a Python package but compiled ones."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.*")):
        if path.suffix != ".pyc" and path.is_file():
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _flat(name: str, value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(f"{name}.{key}", part)
    else:
        yield name, value


def _short(value: object) -> str:
    text = ABSENT if value is None else str(value)
    return text if len(text) <= MAX_LENGTH else f"#{hashlib.sha256(text.encode()).hexdigest()[:16]}"
