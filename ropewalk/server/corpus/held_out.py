"""Text that every Python installation contains, and the part that is not used in training.

The embedded model is trained on the sources of Python's standard library (`training/`). Every
sixteenth file, by a hash of its path, is held out. `ropewalk eval` reads these files by default.
"""

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HELD_OUT_OF = 16
_SHORTEST = 400  # characters; shorter files are stubs
_LEFT_OUT = frozenset({"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})
_BUILD_FOLDER = "config-"  # the interpreter's build settings, one file per machine


@dataclass(frozen=True, slots=True)
class Document:
    """A text with its name: a path, relative if it is in the standard library."""

    name: str
    text: str


def library_documents(*, held_out: bool) -> list[Document]:
    """Return the held-out or the other standard library sources by path, without tests.

    Only its path decides if a file is held out, so this is the same in every installation with the
    file.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in sorted(_sources(root)):
        if is_held_out(path.as_posix()) == held_out:
            text = read_source(root / path)
            if len(text) >= _SHORTEST:
                documents.append(Document(path.as_posix(), text))
    return documents


def is_held_out(relative_path: str) -> bool:
    """Return True for every sixteenth path, by the position-weighted sum of its characters."""
    digest = sum(place * ord(char) for place, char in enumerate(relative_path, start=1))
    return digest % _HELD_OUT_OF == 0


def read_source(path: Path) -> str:
    """Read a file; return an empty text if not UTF-8 (the library has some to test decoders)."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def _sources(root: Path) -> Iterator[Path]:
    """Yield the wanted sources below a folder, relative to it.

    The installed packages, which may be ten times as many files, are not walked through.
    """
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name for name in folders if name not in _LEFT_OUT and not name.startswith(_BUILD_FOLDER)
        ]
        here = Path(folder).relative_to(root)
        yield from (here / name for name in names if name.endswith(".py"))
