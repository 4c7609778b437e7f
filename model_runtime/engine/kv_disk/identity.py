"""The identity of a cache's pages: a hash of everything beside the prompt that decides their bits.

It covers the content of the weights, their form in memory, the layout of a page, and the
arithmetic: processor, libraries, and the sources of attention, kernels and layers. A name or a path
is no part of it. The profile and the salt of a request are in the keys of its pages.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.json_files import read_object
from ropewalk.model_runtime.loading.file_versions import version_of

_KNOWN = "weights.json"  # hashes by file, so that a restart reads no weights
_MOST_KNOWN = 256
_BLOCK = 1 << 20
_SHA256 = re.compile("[0-9a-f]{64}")


def identity_of(facts: Mapping[str, Any]) -> bytes:
    """Return the identity, 32 bytes, of facts that JSON can hold; their order does not matter."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).digest()


class ChangedError(OSError):
    """A file of the weights is no longer the one that was loaded."""


class WeightFiles:
    """The files that a model was loaded from, as they were before the load."""

    def __init__(self, source: Path, versions: Mapping[Path, str | None]) -> None:
        """Take the files of a folder, or the parts of a GGUF file, and their versions."""
        self._versions = versions
        if source.is_dir():
            self._names = {path: path.name for path in versions}
        else:  # parts in their order, so that another file name is the same model
            self._names = {path: f"gguf {at}" for at, path in enumerate(versions, 1)}

    def content(self, known_in: Path | None = None) -> str:
        """Return a hash of the content of weights, config and code.

        Hashes are kept in the folder `known_in`, by device, inode, size and times. Raises OSError,
        also if a file has changed since its version was noted, or has none.
        """
        found = hashlib.sha256()
        known = {} if known_in is None else _known_in(known_in)
        before = dict(known)
        for path, name in self._names.items():
            found.update(f"{name} {self._hash_of(path, known)}\n".encode())
        if known_in is not None and known != before:
            _keep(known_in, known)
        return found.hexdigest()

    def _hash_of(self, path: Path, known: dict[str, Any]) -> str:
        version = self._versions[path]
        if version is None:
            raise ChangedError(f"{path} could not be looked at when the model was loaded")
        with path.open("rb") as file:
            if version_of(os.fstat(file.fileno())) != version:
                raise ChangedError(f"{path} has changed since it was loaded")
            kept = known.get(version)
            if isinstance(kept, str) and _SHA256.fullmatch(kept):
                return kept
            found = hashlib.sha256()
            while block := file.read(_BLOCK):
                found.update(block)
            if version_of(os.fstat(file.fileno())) != version:
                raise ChangedError(f"{path} has changed since it was loaded")
        known[version] = found.hexdigest()
        return found.hexdigest()


def _known_in(folder: Path) -> dict[str, Any]:
    try:
        return dict(read_object(folder / _KNOWN) or {})
    except ModelError:  # it was damaged
        return {}


def _keep(folder: Path, known: dict[str, Any]) -> None:
    part = folder / f".{_KNOWN}.{os.getpid()}"
    with suppress(OSError):  # the next start hashes again
        newest = dict(list(known.items())[-_MOST_KNOWN:])
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(file, "w") as text:
            json.dump(newest, text)
        part.replace(folder / _KNOWN)
