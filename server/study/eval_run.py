"""The parts that both comparisons of `ropewalk eval` share: their error, record and files."""

import csv
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from server.study.jsonl_file import LineFile

ResultT = TypeVar("ResultT")


class EvalError(Exception):
    """A measurement or a write that is impossible; the message is a whole sentence."""


class RunRecord(Generic[ResultT]):
    """Results of finished cells by key, in an append-only file, so that a run can be resumed."""

    def __init__(self, path: Path, results: TypeAdapter[list[ResultT]], *, resumes: bool) -> None:
        """Read the existing file, or begin a new one. Raises EvalError."""
        self._path = path
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
        with writing(self._path.parent):
            self._lines.add(line)
        self._found[key] = results

    def _read(self) -> None:
        for number, line in self._lines.lines():
            try:
                found = json.loads(line)
                self._found[found["key"]] = self._results.validate_python(found["results"])
            except (ValueError, TypeError, KeyError) as error:
                raise EvalError(
                    f"--output: line {number} of {self._path} is not a finished cell; "
                    "--no-resume begins it anew"
                ) from error


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


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Write texts to files by name. Raises EvalError."""
    with writing(folder):
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")


def csv_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a CSV with the names of the first line as its heading; None becomes empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()
