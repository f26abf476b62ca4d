"""The software that makes a program: versions of packages, and the content of this package's files."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
"""Folder of ``gimbal_jax``."""
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokamax", "jax-cuda13-plugin", "jax-cuda13-pjrt")
"""Packages that take part in making a program. Some of them may not be installed."""


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def sources_digest(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of all files of a Python package, except compiled ones."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.*")):
        if path.suffix != ".pyc" and path.is_file():
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()
