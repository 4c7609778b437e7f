"""One run of a study: cells, the record of what was measured, progress, and files of results."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from pydantic import TypeAdapter

from ropewalk.studies.harness.jsonl_file import LineFile
from ropewalk.studies.harness.progress import Progress

ResultT = TypeVar("ResultT")


class EvalError(Exception):
    """A measurement or a write that is impossible; the message is a whole sentence."""


class StudyCell(Protocol):
    """A part of a study that is measured at once, and recorded when it is finished."""

    @property
    def label(self) -> str:
        """Return a label for the progress."""

    @property
    def size(self) -> int:
        """Return the amount of work, in the unit that the progress counts."""

    def in_words(self) -> Mapping[str, Any]:
        """Return a description for readers of the record."""


CellT = TypeVar("CellT", bound=StudyCell)


class RunRecord(Generic[ResultT]):
    """Results of finished cells by key, in an append-only file, so that a run can be resumed."""

    def __init__(self, path: Path, results: TypeAdapter[list[ResultT]], *, resumes: bool) -> None:
        """Read the existing file, or begin a new one. Raises EvalError."""
        self.path = path
        self._lines = LineFile(path)
        self._results = results
        self._found: dict[str, list[ResultT]] = {}
        with writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            if not resumes:
                path.unlink(missing_ok=True)
            elif path.exists():
                self._read()

    def get(self, key: str) -> list[ResultT] | None:
        """Return the results measured under this key in any run, or None."""
        return self._found.get(key)

    def add(self, key: str, cell: Mapping[str, Any], results: list[ResultT]) -> None:
        """Save a finished cell to disk at once. `cell` describes it for readers of the file."""
        line = {"key": key, **cell, "results": self._results.dump_python(results)}
        with writing(self.path.parent):
            self._lines.add(line)
        self._found[key] = results

    def _read(self) -> None:
        for number, line in self._lines.lines():
            try:
                found = json.loads(line)
                self._found[found["key"]] = self._results.validate_python(found["results"])
            except (ValueError, TypeError, KeyError) as error:
                raise EvalError(
                    f"--output: line {number} of {self.path} is not a finished cell; "
                    "--no-resume begins it anew"
                ) from error


def run_study(
    cells: Mapping[str, CellT],
    measure: Callable[[CellT], list[ResultT]],
    record: RunRecord[ResultT],
    progress: Progress,
) -> list[list[ResultT]]:
    """Measure the cells, given by key, that the record lacks; return the results of all in order.

    Each one is saved as soon as it is finished. `measure` advances the progress.
    """
    missing = {key: cell for key, cell in cells.items() if record.get(key) is None}
    if len(missing) < len(cells):
        progress.log(
            f"{len(cells) - len(missing)} of {len(cells)} cells are those of {record.path.name} "
            "and are not measured again (--no-resume measures them)"
        )
    progress.begin(sum(cell.size for cell in missing.values()))
    for number, (key, cell) in enumerate(missing.items(), start=1):
        began = time.monotonic()
        results = measure(cell)
        seconds = time.monotonic() - began
        record.add(key, {**cell.in_words(), "seconds": round(seconds, 3)}, results)
        progress.log(f"{number} of {len(missing)}: {cell.label}, {seconds:.1f} s")
    return [record.get(key) or [] for key in cells]


def key_of(*parts: object) -> str:
    """Return a digest that is equal only for parts that print alike."""
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()[:32]


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Convert an OSError of a write to the folder into an EvalError."""
    try:
        yield
    except OSError as error:
        raise EvalError(
            f"--output: cannot write {error.filename or folder}: {error.strerror}"
        ) from error


def write_files(folder: Path, contents: Mapping[str, Any]) -> None:
    """Write files by name: a text as it is, anything else as JSON. Raises EvalError."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
            (folder / name).write_text(text, encoding="utf-8")
