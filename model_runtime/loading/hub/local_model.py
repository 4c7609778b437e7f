"""Find the folder of a model, and download it first if it is named by hub id.

Nothing of the hub is imported for a folder.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ropewalk.model_runtime.errors import ModelError

# Called with the downloaded bytes and the bytes to download in total.
OnBytes = Callable[[int, int], None]


def no_bytes(_: int, __: int) -> None:
    """Ignore the bytes of a download."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The parts of a model that a command needs, beside config and tokenizer."""

    weights: bool
    code: bool = False  # Python files, which run only if trust_remote_code is set


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model's folder, or its GGUF file, on this machine."""

    folder: Path
    has_weights: bool  # False only for a hub id whose weights are neither wanted nor cached


def is_hub_id(source: str | Path) -> bool:
    """Return whether a model is named by hub id: `name` or `owner/name`, and nothing here."""
    text = str(source)
    if isinstance(source, Path) or Path(text).exists():
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
    if not Path(source).exists():
        raise ModelError(
            f"there is no {'file' if str(source).endswith('.gguf') else 'folder'} {source}"
        )
    if revision is not None:
        raise ModelError(
            f"revision {revision} needs a model by hub id, and {source} is a path: remove revision"
        )
    return LocalModel(Path(source), has_weights=True)
