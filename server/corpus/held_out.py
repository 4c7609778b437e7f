"""Text that every Python installation carries, and the part of it that no training sees.

The embedded model is trained on the sources of Python's standard library (`training/`). Every
sixteenth file, by a hash of its path, is held out: what `ropewalk eval` reads when none is named.
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

_HELD_OUT_OF = 16
_SHORTEST = 400  # characters; below are stubs
_LEFT_OUT = frozenset({"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})
_BUILD_FOLDER = "config-"  # what the interpreter was compiled with, one file per machine


@dataclass(frozen=True, slots=True)
class Document:
    """A text with its name: a path, relative where it is the library's."""

    name: str
    text: str


def library_documents(*, held_out: bool) -> list[Document]:
    """The standard library's sources without its tests, by path: the held-out ones or the others.

    Which file is held out depends on its path alone, so it is the same in every installation that
    has the file.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py") if _wanted(path, root))
    documents = []
    for path in paths:
        if is_held_out(path.as_posix()) == held_out:
            text = read_source(root / path)
            if len(text) >= _SHORTEST:
                documents.append(Document(path.as_posix(), text))
    return documents


def is_held_out(relative_path: str) -> bool:
    """Every sixteenth path, by the sum of its characters' codes weighted by their places."""
    digest = sum(place * ord(char) for place, char in enumerate(relative_path, start=1))
    return digest % _HELD_OUT_OF == 0


def read_source(path: Path) -> str:
    """A file's text; empty where it is not UTF-8 (the library has a few, to test decoders)."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def _wanted(path: Path, root: Path) -> bool:
    folders = path.relative_to(root).parts[:-1]
    return not any(name in _LEFT_OUT or name.startswith(_BUILD_FOLDER) for name in folders)
