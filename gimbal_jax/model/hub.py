"""A model's folder, from the Hugging Face hub where it is none yet."""

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
from huggingface_hub.utils.tqdm import tqdm

FILES = ("*.safetensors", "*.json", "*.jinja", "merges.txt")
"""What is fetched, of the top folder: weights, configuration, tokenizer, chat template."""
_MIB = 2**20
_SIGN_IN = "sign in with `hf auth login` or set HF_TOKEN"


def resolve_model(
    model: str,
    revision: str | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    cache_dir: Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """``model`` itself if it is a folder; otherwise the hub's repository of that name, fetched into the hub's cache.

    Args:
      model: folder, or ``namespace/name``.
      revision: branch, tag or commit; None is the repository's main branch.
      progress: called with (MiB fetched, MiB to fetch).
      cache_dir, endpoint: None takes the hub library's own, which HF_HOME and HF_ENDPOINT set.

    A repository that was fetched before is used without a network. Raises ValueError where
    there is no such model, OSError where it cannot be fetched; both say what to do.
    """
    if Path(model).is_dir():
        if revision is not None:
            raise ValueError(f"{model} is a folder, which has no revision {revision}")
        return Path(model)
    wanted: dict[str, Any] = {
        "repo_id": model,
        "revision": revision,
        "cache_dir": cache_dir,
        "endpoint": endpoint,
        "allow_patterns": list(FILES),
        "ignore_patterns": ["*/*"],
    }
    try:
        total = _check_files(wanted, cache_dir or Path(constants.HF_HUB_CACHE))
        return Path(snapshot_download(**wanted, tqdm_class=_reporter(progress, total)))
    except HFValidationError as error:
        raise ValueError(f"{model} is no folder, and no hub id (namespace/name)") from error
    except GatedRepoError as error:
        raise ValueError(f"{model} is gated: ask for access on its page of the hub, then {_SIGN_IN}") from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"{model} is no folder, and no model of the hub; if it is private, {_SIGN_IN}") from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{model} has no revision {revision}") from error
    except LocalEntryNotFoundError as error:
        raise OSError(f"{model} is no folder, is not in the cache, and the hub cannot be reached: {error}") from error
    except (NetworkError, XetDownloadError) as error:
        raise OSError(f"{model} cannot be fetched from the hub: {error}") from error


def _check_files(wanted: dict[str, Any], cache_dir: Path) -> int:
    """Bytes to fetch; 0 where the hub does not say, so that only the cache can have the model."""
    try:
        files = snapshot_download(**wanted, dry_run=True, tqdm_class=_reporter(lambda done, total: None, 0))
    except DryRunError:
        return 0
    if not any(file.filename.endswith(".safetensors") for file in files):
        raise ValueError(f"{wanted['repo_id']} has no safetensors")
    total = sum(file.file_size or 0 for file in files if file.will_download)
    existing = next(folder for folder in (cache_dir, *cache_dir.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if total > free:
        raise OSError(
            f"{wanted['repo_id']} takes {total / _MIB:,.0f} MiB, of which {cache_dir} has {free / _MIB:,.0f} free; "
            "set HF_HOME to a folder with more"
        )
    return total


def _reporter(progress: Callable[[int, int], None], total: int) -> type[tqdm]:
    """The class of bars that the library makes: they show nothing, and those that count bytes report them."""

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts, self.count = kwargs.get("unit") == "B", 0
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.count += int(n or 0)
            if self.counts:
                # One bar counts what comes over the network, one what is written, which may be more.
                progress(min(self.count, total) // _MIB, total // _MIB)

    return Bar
