"""Facts that all processes of a server must have in common, as short texts by name."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from gimbal_jax.config import ModelConfig, ServerConfig
from gimbal_jax.serving.runtime.environment import PACKAGE, PACKAGES, installed_version, sources_digest
from gimbal_jax.version import __version__

ABSENT = "none"
"""Value of a fact that a process does not have."""
MAX_LENGTH = 80
"""Most characters of a value. A longer one is replaced by its hash."""


def facts_of(
    model: ModelConfig, config: ServerConfig, checkpoint: str, options: Mapping[str, object]
) -> dict[str, str]:
    """Return the facts that all processes must agree on before they compute together.

    They are: versions, this package's own files, the architecture, mesh and engines, how many experts a migration
    moves, the fingerprint ``checkpoint``, and the ``options`` that every process uses. Settings that only the leader
    uses are not among them.
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
    """Return a line for each fact of a process that is not the leader's: its name and both values."""
    return [
        f"{name}: {leader_facts.get(name, ABSENT)} in process 0, {facts.get(name, ABSENT)} in process {process}"
        for name in dict.fromkeys((*leader_facts, *facts))
        if leader_facts.get(name, ABSENT) != facts.get(name, ABSENT)
    ]


def _flat(name: str, value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(f"{name}.{key}", part)
    else:
        yield name, value


def _short(value: object) -> str:
    text = ABSENT if value is None else str(value)
    return text if len(text) <= MAX_LENGTH else f"#{hashlib.sha256(text.encode()).hexdigest()[:16]}"
