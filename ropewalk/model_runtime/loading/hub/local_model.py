"""Find the folder of a model, and download it first if it is named by hub id.

Nothing of the hub is imported for a folder.
"""

import os
from pathlib import Path

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.hub.wanted import LocalModel, OnBytes, Wanted, no_bytes


def is_there(path: str | Path) -> bool:
    """Return whether a path exists. None that is too long for the system does."""
    return os.path.exists(path)  # noqa: PTH110  # Path.exists raises for it before Python 3.12


def is_hub_id(source: str | Path) -> bool:
    """Return whether a model is named by hub id: `name` or `owner/name`, and nothing here."""
    text = str(source)
    if isinstance(source, Path) or is_there(text):
        return False
    is_path = text.startswith((".", "/", "~")) or text.endswith(".gguf")
    return not is_path and text.count("/") <= 1


def local_model(
    source: str | Path,
    wanted: Wanted,
    revision: str | None = None,
    on_bytes: OnBytes = no_bytes,
) -> LocalModel:
    """Return the model's folder or GGUF file; a hub id's files are downloaded unless cached.

    `revision` is a branch, a tag or a commit of a hub id; None means the default branch.

    Raises ModelError if there is no such model, if it cannot be downloaded, or if a revision is
    given for a folder.
    """
    if is_hub_id(source):
        # Imported here, because a folder needs nothing of it.
        from ropewalk.model_runtime.loading.hub.snapshot import fetch  # noqa: PLC0415

        return fetch(str(source), revision, wanted, on_bytes)
    if not is_there(source):
        raise ModelError(
            f"there is no {'file' if str(source).endswith('.gguf') else 'folder'} {source}"
        )
    if revision is not None:
        raise ModelError(
            f"revision {revision} needs a model by hub id, and {source} is a path: remove revision"
        )
    return LocalModel(Path(source), has_weights=True)
