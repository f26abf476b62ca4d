"""The folder of a model, which is downloaded from the Hugging Face hub if needed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    XetDownloadError,
)
from huggingface_hub.errors import HTTPError as NetworkError  # type: ignore[attr-defined]  # of its HTTP library
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from huggingface_hub.utils.tqdm import tqdm

FILES = ("*.safetensors", "*.json", "*.jinja", "merges.txt")
"""Patterns of the files to download: weights, configuration, tokenizer, chat template. Only the top folder counts."""
_MIB = 2**20
_SIGN_IN = "sign in with `hf auth login` or set HF_TOKEN"


def check_name(model: str) -> None:
    """Check without a network that ``model`` may be resolved. ValueError if it is neither a folder nor a hub id."""
    if not Path(model).is_dir():
        try:
            validate_repo_id(model)
        except HFValidationError as error:
            raise ValueError(f"{model} is neither a folder nor a hub id (namespace/name)") from error


def resolve_model(
    model: str,
    revision: str | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    cache_dir: Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """Return the folder of a model, and download the model from the Hugging Face hub if ``model`` is not a folder.

    A model that is already in the hub library's cache needs no network.

    Args:
      model: folder, or ``namespace/name`` on the hub.
      revision: branch, tag or commit; None is the main branch of the repository.
      progress: called with (MiB downloaded, MiB to download).
      cache_dir: folder of downloads; None is the default of the hub library, which HF_HOME sets.
      endpoint: address of the hub; None is the default of the hub library, which HF_ENDPOINT sets.

    Raises:
      ValueError: there is no such model or revision, or it has no safetensors.
      OSError: the model cannot be downloaded.
    """
    check_name(model)
    if Path(model).is_dir():
        if revision is not None:
            raise ValueError(f"{model} is a folder, which has no revision {revision}")
        return Path(model)
    request: dict[str, Any] = {
        "repo_id": model,
        "revision": revision,
        "cache_dir": cache_dir,
        "endpoint": endpoint,
        "allow_patterns": list(FILES),
        "ignore_patterns": ["*/*"],
    }
    # Errors of the hub library become ValueError for a wrong name, and OSError for a failed download.
    try:
        total = _check_files(request, cache_dir or Path(constants.HF_HUB_CACHE))
        return Path(snapshot_download(**request, tqdm_class=_reporter(progress, total)))
    except GatedRepoError as error:
        raise ValueError(f"{model} is gated: request access on its page of the hub, then {_SIGN_IN}") from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"{model} is neither a folder nor a model of the hub; if it is private, {_SIGN_IN}") from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{model} has no revision {revision}") from error
    except LocalEntryNotFoundError as error:
        raise OSError(
            f"{model} is not a folder and not in the cache, and the hub cannot be reached: {error}"
        ) from error
    except (NetworkError, XetDownloadError) as error:
        raise OSError(f"{model} cannot be downloaded from the hub: {error}") from error


def _check_files(request: dict[str, Any], cache_dir: Path) -> int:
    """Return the bytes to download; 0 if the hub does not answer, in which case only the cache can hold the model.

    Raises ValueError without safetensors, and OSError if the disk is too full.
    """
    try:
        files = snapshot_download(**request, dry_run=True, tqdm_class=_reporter(lambda done, total: None, 0))
    except DryRunError:
        return 0
    if not any(file.filename.endswith(".safetensors") for file in files):
        raise ValueError(f"{request['repo_id']} has no safetensors")
    total = sum(file.file_size or 0 for file in files if file.will_download)
    # The cache may not exist yet: measure the disk of its nearest existing parent.
    existing = next(folder for folder in (cache_dir, *cache_dir.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if total > free:
        raise OSError(
            f"{request['repo_id']} takes {total / _MIB:,.0f} MiB, and {cache_dir} has {free / _MIB:,.0f} MiB free; "
            "set HF_HOME to a folder with more"
        )
    return total


def _reporter(progress: Callable[[int, int], None], total: int) -> type[tqdm]:
    """Return a class for the hub library's progress bars: bars that count bytes report them, and none is shown."""

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts, self.count = kwargs.get("unit") == "B", 0
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.count += int(n or 0)
            if self.counts:
                # One bar counts bytes from the network, another the bytes written, which may exceed the total.
                progress(min(self.count, total) // _MIB, total // _MIB)

    return Bar
