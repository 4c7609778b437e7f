"""Download of a hub id's files into the cache that all programs of Hugging Face share.

The library huggingface_hub decides the cache by HF_HOME and HF_HUB_CACHE, and sends nothing if
HF_HUB_OFFLINE is set. A file is complete before it gets its name in the cache.
"""

import errno
import glob
import os
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import structlog
from huggingface_hub import (
    HfApi,
    constants,
    hf_hub_download,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.file_download import repo_folder_name

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.files.folder_files import (
    INDEX,
    SINGLE,
    weight_files,
    weight_map_files,
)
from ropewalk.model_runtime.loading.hub.download_progress import DownloadProgress
from ropewalk.model_runtime.loading.hub.hub_faults import (
    download_fault,
    is_unreachable,
    lookup_fault,
)
from ropewalk.model_runtime.loading.hub.needed_files import REQUIRED, needed_files
from ropewalk.model_runtime.loading.hub.wanted import LocalModel, OnBytes, Wanted
from ropewalk.model_runtime.size_text import size_text

_log = structlog.get_logger(__name__)


def fetch(model_id: str, revision: str | None, wanted: Wanted, on_bytes: OnBytes) -> LocalModel:
    """Return the folder of a hub id's snapshot with the wanted files, downloaded if necessary.

    If the hub cannot be reached, a complete snapshot in the cache is used. Raises ModelError.
    """
    if constants.HF_HUB_OFFLINE:
        return _cached(model_id, revision, wanted)
    try:
        info = HfApi().model_info(
            model_id,
            revision=revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
    except Exception as error:  # the HTTP library's own errors pass through
        fault = lookup_fault(error, model_id, revision)
        if not is_unreachable(error):
            raise fault from error
        try:
            found = _cached(model_id, revision, wanted)
        except ModelError:
            raise fault from error
        _log.warning("hub_unreachable", reason=str(fault), uses=str(found.folder))
        return found
    siblings = {each.rfilename: each for each in info.siblings or ()}
    try:
        files = needed_files(model_id, siblings, wanted, _index_reader(model_id, str(info.sha)))
        absent = [name for name in files if not _is_cached(model_id, info.sha, siblings[name])]
        folder = _download(model_id, revision, files, [siblings[name] for name in absent], on_bytes)
    except ModelError:
        raise
    except Exception as error:
        raise download_fault(error, model_id, revision) from error
    return _complete(model_id, folder, wanted)


def _download(
    model_id: str,
    revision: str | None,
    files: Sequence[str],
    absent: Sequence[Any],
    on_bytes: OnBytes,
) -> Path:
    """Download files, whose absent ones are described by the hub. Errors of the library pass."""
    num_bytes = sum(each.size or 0 for each in absent)
    cache = Path(constants.HF_HUB_CACHE)
    if absent:
        free = _check_room(model_id, num_bytes, cache)
        _log.info(
            "downloading",
            model=model_id,
            revision=revision or constants.DEFAULT_REVISION,
            files=len(absent),
            bytes_total=num_bytes,
            cache=str(cache),
            bytes_free=free,
        )
    began_s = time.monotonic()
    with DownloadProgress(model_id, num_bytes, on_bytes) as progress:
        folder = snapshot_download(
            model_id,
            # By name, not by commit: the library then records the name for HF_HUB_OFFLINE.
            revision=revision,
            allow_patterns=[glob.escape(name) for name in files],
            tqdm_class=progress.bars(),
        )
    seconds = round(time.monotonic() - began_s, 1)
    _log.info("downloaded" if absent else "in_cache", model=model_id, folder=folder, s=seconds)
    return Path(folder)


def _index_reader(model_id: str, commit: str) -> Callable[[], Collection[str]]:
    """Return a function that downloads the index of the weights and returns the files it names."""

    def read() -> Collection[str]:
        path = Path(hf_hub_download(model_id, INDEX, revision=commit))
        try:
            return weight_map_files(path)
        except ValueError as error:
            raise ModelError(f"{model_id}: {INDEX} on the hub is no index of weights") from error

    return read


def _is_cached(model_id: str, commit: str | None, sibling: Any) -> bool:
    """Return whether the cache has a file, for this commit or with the same content."""
    if isinstance(try_to_load_from_cache(model_id, sibling.rfilename, revision=commit), str):
        return True
    content = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
    return bool(content) and (_model_folder(model_id) / "blobs" / content).is_file()


def _check_room(model_id: str, num_bytes: int, cache: Path) -> int:
    """Return the free bytes of the cache's disk.

    Raises ModelError if they are too few, and OSError if the cache cannot be written.
    """
    cache.mkdir(parents=True, exist_ok=True)
    if not os.access(cache, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(cache))
    free = shutil.disk_usage(cache).free
    if num_bytes > free:
        raise ModelError(
            f"{model_id} needs {size_text(num_bytes)} of disk, and {size_text(free)} are free in "
            f"the hub's cache {cache}: free some, or set HF_HOME to a folder on a larger disk"
        )
    return free


def _cached(model_id: str, revision: str | None, wanted: Wanted) -> LocalModel:
    """Return the snapshot in the cache without asking the hub. Raises ModelError."""
    revision = revision or constants.DEFAULT_REVISION
    try:
        folder = snapshot_download(
            model_id, revision=revision, allow_patterns=list(REQUIRED), local_files_only=True
        )
    except EntryNotFoundError as error:
        raise ModelError(
            f"there is no folder {model_id}, and the hub's cache {constants.HF_HUB_CACHE} has no "
            f"revision {revision} of such a model: unset HF_HUB_OFFLINE, or copy the cache of "
            "another machine"
        ) from error
    except ValueError as error:  # not a hub id
        raise lookup_fault(error, model_id, revision) from error
    return _complete(model_id, Path(folder), wanted)


def _complete(model_id: str, folder: Path, wanted: Wanted) -> LocalModel:
    """Return a snapshot that has all wanted files. Raises ModelError that names a missing one.

    An interrupted download leaves a snapshot without some of its files.
    """
    missing = [name for name in REQUIRED if not (folder / name).is_file()]
    has_weights = _has_weights(folder)
    if wanted.weights and not has_weights:
        missing.append("a part of its weights" if (folder / INDEX).is_file() else SINGLE)
    if missing:
        raise ModelError(
            f"the hub's cache has {model_id} without {missing[0]} ({folder}): start once with "
            "network and without HF_HUB_OFFLINE, which downloads the rest"
        )
    return LocalModel(folder, has_weights)


def _has_weights(folder: Path) -> bool:
    try:
        return bool(weight_files(folder))
    except ModelError:  # the index names a file that is not there
        return False


def _model_folder(model_id: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model_id, repo_type="model")
